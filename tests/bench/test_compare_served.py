"""Comparing real servers over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.errors import BenchError
from shoal.bench.runs.server_process import serving
from shoal.cli import main
from shoal.config import EngineConfig

pytestmark = pytest.mark.e2e

TRACE = """arrived_at,num_prefill_tokens,num_decode_tokens
0.0,30,4
0.1,9000,4
0.2,20,8
"""


@pytest.fixture(scope="module")
def report(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Static and continuous on three requests; the second is too long for the model."""
    directory = tmp_path_factory.mktemp("served")
    (directory / "requests.csv").write_text(TRACE)
    flags = f"bench compare --served --model {model_path} --trace {directory}/requests.csv"
    flags += f" --scheduler static --scheduler continuous --load 1 --output {directory}/report.html"
    flags += " --max-num-seqs 2 --kv-cache-memory-mib 256"
    assert main(flags.split()) == 1  # a request failed
    return directory / "report.html"


def runs(report: Path) -> list[dict[str, Any]]:
    content = json.loads(report.with_suffix(".json").read_text())
    result: list[dict[str, Any]] = content["runs"]
    return result


def test_each_run_has_the_figures_of_the_client_and_of_the_engine(report: Path) -> None:
    assert len(runs(report)) == 4
    for run in runs(report):
        figures = run["figures"]
        assert figures["requests_completed"] == 2
        assert figures["input_tokens"] == 50
        assert figures["output_tokens"] == 12
        assert figures["e2e_mean_ms"] >= figures["ttft_mean_ms"] > figures["queue_time_mean_ms"]
        assert 0 < figures["slot_utilization"] <= 1
        assert 0 < figures["kv_cache_usage_max"] < 1
        assert figures["load_generator_cpu_share"] > 0


def test_a_continuous_batch_streams_and_a_static_one_waits_to_fill(report: Path) -> None:
    by_strategy = {run["strategy"]: run["figures"] for run in runs(report) if run["rate"] is None}
    assert by_strategy["continuous"]["slot_utilization"] > by_strategy["static"]["slot_utilization"]
    assert by_strategy["static"]["tpot_mean_ms"] < by_strategy["continuous"]["tpot_mean_ms"]


def test_failures_are_counted_and_told(report: Path) -> None:
    for run in runs(report):
        assert run["failures"] == {"http_400": 1}
        assert run["figures"]["requests_failed"] == 1
    html = report.read_text()
    assert "What failed" in html
    assert html.count("1 x http_400") == 4
    assert ">failed</th>" in html


def test_the_report_says_that_servers_were_measured(report: Path) -> None:
    content = json.loads(report.with_suffix(".json").read_text())
    assert content["mode"] == "served"
    assert "a static batch waits up to 1 s to fill" in content["mode_in_words"]
    assert content["mode_in_words"].split("'")[0] in report.read_text()


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    config = EngineConfig(model=str(tmp_path / "missing.gguf"))
    with pytest.raises(BenchError, match=r"missing\.gguf"), serving(config, tmp_path):
        pass
