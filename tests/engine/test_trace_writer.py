"""The trace of an engine's steps: a viewer can read it, and it tells what happened."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from fake_executor import FakeExecutor

from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.trace import StepTrace
from shoal.request import Request, SamplingParams
from shoal.scheduler import create_scheduler

NUM_BLOCKS = 20


def trace(path: Path, *lengths: tuple[int, int], close: bool = True) -> list[dict[str, Any]]:
    """Runs requests of (prompt, output) tokens, a clock tick of a second each time it is read."""
    ticks = itertools.count(1)
    scheduler = create_scheduler(EngineConfig(max_num_seqs=4), NUM_BLOCKS, max_model_len=200)
    observer = StepTrace(path)
    executor = FakeExecutor(NUM_BLOCKS)
    core = EngineCore(scheduler, executor, lambda: float(next(ticks)), observers=[observer])
    for index, (num_prompt, num_output) in enumerate(lengths):
        params = SamplingParams(max_tokens=num_output)
        core.add([Request(f"{index}", [5] * num_prompt, params, num_output, seed=index)])
    while core.has_work():
        core.step()
    if not close:
        return []
    core.close()
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return events


def test_every_step_has_its_three_parts_one_after_the_other(tmp_path: Path) -> None:
    events = trace(tmp_path / "trace.json", (20, 3), (5, 2))
    spans = [event for event in events if event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["schedule", "execute", "update"] * 3
    for earlier, later in itertools.pairwise(spans):
        assert earlier["ts"] + earlier["dur"] <= later["ts"]
    executed = [span["args"] for span in spans if span["name"] == "execute"]
    assert [args["tokens"] for args in executed] == [25, 2, 1]
    assert [args["useful"] for args in executed] == [2, 2, 1]
    assert [args["rows"] for args in executed] == [
        {"prefill": ["0", "1"], "decode": [], "padding": []},
        {"prefill": [], "decode": ["0", "1"], "padding": []},
        {"prefill": [], "decode": ["0"], "padding": []},
    ]


def test_an_ended_request_has_its_phases_from_arrival_to_end(tmp_path: Path) -> None:
    events = trace(tmp_path / "trace.json", (20, 3))
    phases = [event for event in events if event.get("cat") == "request"]
    assert [(event["name"], event["ph"]) for event in phases] == [
        (name, ph) for name in ("queue", "prefill", "decode") for ph in "be"
    ]
    times = [event["ts"] for event in phases]
    assert times == sorted(times)
    assert times[1] == times[2]
    assert times[3] == times[4]


def test_counters_follow_the_requests_and_the_blocks(tmp_path: Path) -> None:
    events = trace(tmp_path / "trace.json", (40, 2))
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert Counter(name for name, _ in counters) == {"requests": 2, "KV blocks": 2}
    assert counters[1] == ("KV blocks", {"used": 3, "free": NUM_BLOCKS - 3})
    assert counters[-1] == ("KV blocks", {"used": 0, "free": NUM_BLOCKS})


def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    trace(Path("/dev/full"), (20, 90), close=False)  # more than the file's buffer holds
    assert [record.message for record in caplog.records] == [
        "the trace ends here, its file can't be written: [Errno 28] No space left on device"
    ]


def test_closing_a_trace_on_a_full_disk_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    StepTrace(Path("/dev/full")).close()
    assert "the trace ends here" in caplog.text
