"""The files for Prometheus and Grafana: they only ask for metrics that the server has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import exposition
import pytest
import yaml
from fake_engine import FakeEngine, Served

DEPLOY = Path(__file__).parents[2] / "deploy"


def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    return content


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    variables = [variable["query"] for variable in dashboard()["templating"]["list"]]
    return panels + variables + [rule["expr"] for rule in alerts()]


@pytest.fixture
async def series(served: Served, engine: FakeEngine) -> dict[str, set[str]]:
    """The label names of each sample that the server shows."""
    engine.report()
    found: dict[str, set[str]] = {}
    for sample in exposition.samples((await served.client.get("/metrics")).text):
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def test_every_metric_and_label_asked_for_exists(series: dict[str, set[str]]) -> None:
    asked = [
        (name, re.findall(r"(\w+)=~?\"", selector or ""))
        for expression in expressions()
        for name, selector in re.findall(r"(shoal:\w+)(\{[^}]*\})?", expression)
    ]
    assert len(asked) > 20
    for name, labels in asked:
        assert name in series
        assert set(labels) <= series[name] | {"instance"}


async def test_every_value_of_a_label_asked_for_exists(served: Served) -> None:
    text = (await served.client.get("/metrics")).text
    for expression in expressions():
        for name, label, values in re.findall(
            r"(shoal:\w+)\{(?:[^}]*[, ])?(finished_reason|reason)=~?\"([^\"]+)\"", expression
        ):
            for value in values.split("|"):
                assert exposition.value(text, name, **{label: value}) == 0


def test_counters_and_histograms_are_only_asked_for_their_rates() -> None:
    for expression in expressions():
        for match in re.finditer(r"shoal:\w+_(total|bucket|sum|count)\b", expression):
            assert expression[: match.start()].endswith("rate("), expression


def test_every_alert_says_what_to_do_and_how_bad_it_is() -> None:
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert re.fullmatch(r"\d+m", rule["for"])


def test_the_panels_lie_beside_each_other() -> None:
    places = set()
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places
        places |= cells
