"""Replaying requests on an engine: what is recorded is what the engine did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.bench.comparison.timeline import lanes_of
from shoal.bench.runs.replay import Replay, ReplayEngine
from shoal.bench.runs.steps import RowKind, StepRecord
from shoal.config import EngineConfig

PROMPTS = [[2000 + i] * length for i, length in enumerate((40, 20, 30, 10))]
LENGTHS = [3, 9, 5, 2]


def replay(model_path: Path, times: list[float] | None = None, **settings: Any) -> Replay:
    config = EngineConfig(model=str(model_path), kv_cache_memory_mib=64, **settings)
    engine = ReplayEngine(config)
    try:
        return engine.run(PROMPTS, LENGTHS, times or [0.0] * len(PROMPTS))
    finally:
        engine.close()


@pytest.mark.parametrize("scheduler", ["static", "dynamic", "continuous"])
def test_every_request_is_recorded_with_its_tokens(model_path: Path, scheduler: str) -> None:
    result = replay(model_path, scheduler=scheduler, max_num_seqs=2)
    assert result.num_failed == 0
    timelines = sorted(result.timelines, key=lambda timeline: timeline.num_output_tokens)
    assert [timeline.num_output_tokens for timeline in timelines] == sorted(LENGTHS)
    assert sum(timeline.num_input_tokens for timeline in timelines) == sum(map(len, PROMPTS))
    for timeline in timelines:
        assert timeline.sent <= timeline.first_token <= timeline.last_token
    assert sum(step.num_useful_slots for step in result.steps) == sum(LENGTHS)


def test_static_batches_use_as_many_slots_as_the_lengths_say(model_path: Path) -> None:
    result = replay(model_path, scheduler="static", max_num_seqs=2)
    # Each batch: a step for the prompts, which brings the first tokens, then one for each other.
    assert result.stats.slot_utilization == sum(LENGTHS) / (2 * 9 + 2 * 5)
    kinds = [kind for step in result.steps for kind in step.rows.values()]
    assert kinds.count(RowKind.PADDING) == (9 - 3) + (5 - 2)


def test_skipping_the_padding_computes_fewer_rows_in_the_same_slots(model_path: Path) -> None:
    result = replay(model_path, scheduler="static", max_num_seqs=2, skip_padding=True)
    assert result.stats.slot_utilization == sum(LENGTHS) / (2 * 9 + 2 * 5)
    assert all(RowKind.PADDING not in step.rows.values() for step in result.steps)


def test_a_static_answer_is_seen_when_its_batch_ends(model_path: Path) -> None:
    result = replay(model_path, scheduler="static", max_num_seqs=4)
    assert len({timeline.last_token for timeline in result.timelines}) == 1
    assert all(timeline.first_token == timeline.last_token for timeline in result.timelines)


def test_requests_are_taken_in_at_their_times(model_path: Path) -> None:
    result = replay(model_path, [0.0, 0.3, 0.6, 0.9], max_num_seqs=4)
    first_steps: dict[str, float] = {}
    for step in result.steps:
        for request_id in step.rows:
            first_steps.setdefault(request_id, step.start)
    starts = sorted(first_steps.values())
    assert all(start >= at for start, at in zip(starts, [0.0, 0.3, 0.6, 0.9], strict=True))
    assert sorted(timeline.sent for timeline in result.timelines) == pytest.approx(
        [0.0, 0.3, 0.6, 0.9]
    )


def test_a_slot_is_given_to_the_next_request_when_its_holder_has_ended() -> None:
    def step(number: int, *names: str) -> StepRecord:
        rows = dict.fromkeys(names, RowKind.DECODE)
        return StepRecord(float(number), number + 1.0, rows, len(rows), 2, len(rows), 1, 0)

    lanes = lanes_of([step(0, "a", "b"), step(1, "b"), step(2, "b", "c")])
    assert {lane.request_id: lane.slot for lane in lanes} == {"a": 0, "b": 1, "c": 0}
    (segment,) = next(lane.segments for lane in lanes if lane.request_id == "b")
    assert (segment.start, segment.end) == (0.0, 3.0)
