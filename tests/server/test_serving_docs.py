"""docs/serving.md names everything that the server offers, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

from fake_engine import FakeEngine, Served
from prometheus_client.parser import text_string_to_metric_families

from shoal.config import EngineConfig
from shoal.server.config import ServerConfig
from shoal.server.protocol import OPTION_FIELDS

DOCS = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()


async def test_the_metrics_are_those_of_the_server(served: Served, engine: FakeEngine) -> None:
    engine.report()
    text = (await served.client.get("/metrics")).text
    shown = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
    }
    assert set(re.findall(r"shoal:[a-z0-9_]+", DOCS)) == shown


async def test_every_endpoint_is_named(served: Served) -> None:
    description = json.loads((await served.client.get("/openapi.json")).content)
    for path in description["paths"]:
        assert re.sub(r"/\{.*", "", path) in DOCS


def test_every_option_of_a_request_is_explained() -> None:
    for name in OPTION_FIELDS:
        assert f"| `{name}` |" in DOCS


def test_every_flag_named_exists() -> None:
    settings = {field.name for field in (*fields(EngineConfig), *fields(ServerConfig))}
    for flag in re.findall(r"--([a-z][a-z-]+)", DOCS):
        name = flag.replace("-", "_")
        assert name.removeprefix("no_") in settings or name == "help", flag
