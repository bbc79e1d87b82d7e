"""What is read from a step trace is what the engine did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.bench.errors import BenchError
from shoal.bench.runs.replay import Replay, ReplayEngine
from shoal.bench.runs.step_trace import read_engine_record
from shoal.bench.runs.steps import StepRecord
from shoal.config import EngineConfig

PROMPTS = [[2000 + i] * length for i, length in enumerate((40, 20, 30, 10))]
LENGTHS = [3, 9, 5, 2]


@pytest.fixture(scope="module")
def traced(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Replay, Path]:
    """A replay of static batches, which have rows of every kind, and its trace."""
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    config = EngineConfig(
        model=str(model_path),
        kv_cache_memory_mib=64,
        scheduler="static",
        max_num_seqs=2,
        trace_file=str(path),
    )
    engine = ReplayEngine(config)
    try:
        return engine.run(PROMPTS, LENGTHS, [0.0] * len(PROMPTS)), path
    finally:
        engine.close()


def first_step(path: Path) -> float:
    """When the first step began, in seconds of the engine's clock."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return min(float(event["ts"]) for event in events if event["name"] == "execute") / 1e6


def without_times(step: StepRecord) -> StepRecord:
    rows = {request_id.partition("/")[0]: kind for request_id, kind in step.rows.items()}
    return replace(step, start=0.0, end=0.0, rows=rows)


def test_the_trace_tells_the_same_as_the_engine_in_this_process(
    traced: tuple[Replay, Path],
) -> None:
    replay, path = traced
    start = first_step(path) - replay.steps[0].start
    record, expected = read_engine_record(path, start - 1e-6), replay.outcome.engine
    assert list(map(without_times, record.steps)) == list(map(without_times, expected.steps))
    for step, other in zip(record.steps, expected.steps, strict=True):
        assert (step.start, step.end) == pytest.approx((other.start, other.end), abs=1e-4)
    assert sorted(record.queue_times) == pytest.approx(sorted(expected.queue_times), abs=1e-4)
    assert record.num_blocks == expected.num_blocks
    assert record.slot_utilization == expected.slot_utilization


def test_what_was_before_is_left_out(traced: tuple[Replay, Path]) -> None:
    replay, path = traced
    begin = first_step(path) + replay.steps[4].end - replay.steps[0].start
    record = read_engine_record(path, begin)
    assert len(record.steps) == len(replay.steps) - 5
    assert all(step.start >= 0 for step in record.steps)


def test_a_trace_without_a_step_is_refused(traced: tuple[Replay, Path]) -> None:
    _, path = traced
    with pytest.raises(BenchError, match="no step of the measured requests"):
        read_engine_record(path, first_step(path) + 1e6)


@pytest.mark.parametrize("content", ["", "[{", '[{"name": "execute"}]'])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(BenchError, match=r"trace\.json"):
        read_engine_record(path, 0.0)
