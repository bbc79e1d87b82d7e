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
from shoal.request import FinishReason, Request, SamplingParams
from shoal.scheduler import create_scheduler
from shoal.scheduler.interface import ScheduledStep, StepResult

NUM_BLOCKS = 20
STRATEGIES = pytest.mark.parametrize("strategy", ["static", "dynamic", "continuous"])


class BrokenExecutor(FakeExecutor):
    """Fails every step."""

    def execute(self, step: ScheduledStep) -> StepResult:
        raise RuntimeError("no luck")


class TracedEngine:
    """An engine with a trace whose clock ticks a second each time it is read."""

    def __init__(self, path: Path, executor: FakeExecutor | None = None, **settings: Any) -> None:
        self.path = path
        self._now = 0
        config = EngineConfig(**{"max_num_seqs": 4, **settings})
        scheduler = create_scheduler(config, NUM_BLOCKS, max_model_len=200)
        executor = executor or FakeExecutor(NUM_BLOCKS)
        self.core = EngineCore(scheduler, executor, self._tick, observers=[StepTrace(path)])

    def _tick(self) -> float:
        self._now += 1
        return float(self._now)

    def add(self, request_id: str, num_prompt: int, num_output: int, **fields: Any) -> None:
        params = SamplingParams(max_tokens=num_output)
        self.core.add([Request(request_id, [5] * num_prompt, params, num_output, seed=0, **fields)])

    def run(self) -> None:
        self.core.end_input()
        while self.core.has_work():
            self.core.step()

    def events(self) -> list[dict[str, Any]]:
        """What the trace holds in the end."""
        self.core.close()
        events: list[dict[str, Any]] = json.loads(self.path.read_text())
        return events


def trace(path: Path, *lengths: tuple[int, int]) -> list[dict[str, Any]]:
    """The trace of requests of (prompt, output) tokens that came to their end."""
    engine = TracedEngine(path)
    for index, (num_prompt, num_output) in enumerate(lengths):
        engine.add(f"{index}", num_prompt, num_output)
    engine.run()
    return engine.events()


def track(events: list[dict[str, Any]], request_id: str) -> tuple[list[str], dict[str, Any]]:
    """The phases on a request's track, and what its end says.

    They lie one after the other within the span of the request.
    """
    request, *phases, end = [event for event in events if event.get("id") == request_id]
    assert [(event["name"], event["ph"]) for event in (request, end)] == [
        ("request", "b"),
        ("request", "e"),
    ]
    names = [phase["name"] for phase in phases[::2]]
    assert [(p["name"], p["ph"]) for p in phases] == [(n, ph) for n in names for ph in "be"]
    times = [event["ts"] for event in (request, *phases, end)]
    assert times == sorted(times)
    assert times[::2] == times[1::2]  # no gaps
    return names, end["args"]


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


def test_an_answer_that_is_complete_has_its_phases_from_arrival_to_end(tmp_path: Path) -> None:
    phases, end = track(trace(tmp_path / "trace.json", (20, 3)), "0")
    assert phases == ["queue", "prefill", "decode"]
    assert end == {"finish_reason": "length", "cached_tokens": 0, "preemptions": 0}


def test_the_file_holds_whole_events_at_any_time(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json")
    engine.add("0", 20, 3)
    for num_steps in (0, 1, 2):
        events = json.loads(engine.path.read_text() + "]")  # as viewers complete it
        assert sum(event["name"] == "execute" for event in events) == num_steps
        engine.core.step()


def test_a_track_says_what_the_client_calls_its_request(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json", max_num_seqs=1)
    engine.add("computed", 20, 3, client_request_id="mine")
    engine.add("queued", 20, 3, client_request_id="yours")
    engine.add("nameless", 20, 3)
    engine.core.step()
    engine.core.abort(["queued"])
    engine.run()
    names = {
        event["id"]: event.get("args")
        for event in engine.events()
        if (event["name"], event["ph"]) == ("request", "b")
    }
    assert names == {
        "computed": {"client_request_id": "mine"},
        "queued": {"client_request_id": "yours"},
        "nameless": None,
    }


@STRATEGIES
def test_the_track_of_a_client_that_left_ends_where_it_left(tmp_path: Path, strategy: str) -> None:
    engine = TracedEngine(tmp_path / "trace.json", scheduler=strategy, max_num_seqs=1)
    engine.add("decodes", 20, 9)
    engine.add("waits", 20, 9)
    engine.core.step()
    engine.core.step()
    engine.core.abort(["decodes", "waits"])
    events = engine.events()
    for request_id in ("decodes", "waits"):
        phases, end = track(events, request_id)
        assert phases[-1] == {"decodes": "decode", "waits": "queue"}[request_id]
        assert end["finish_reason"] == "abort"


def test_the_track_of_a_client_that_left_amid_its_prompt_ends_there(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json", max_num_batched_tokens=16)
    engine.add("long", 50, 9)
    engine.core.step()
    engine.core.abort(["long"])
    phases, end = track(engine.events(), "long")
    assert (phases, end["finish_reason"]) == (["queue", "prefill"], "abort")


def test_the_track_of_an_answer_that_a_stop_string_ended_says_so(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json")
    engine.add("stops", 20, 9)
    engine.core.step()
    engine.core.abort(["stops"], FinishReason.STOP)
    assert track(engine.events(), "stops")[1]["finish_reason"] == "stop"


def test_the_track_of_a_request_that_waited_too_long_ends_in_the_queue(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json", max_num_seqs=1)
    engine.add("runs", 20, 9)
    engine.add("waits", 20, 9, max_queue_time=10.0)
    engine.run()
    phases, end = track(engine.events(), "waits")
    assert (phases, end["finish_reason"]) == (["queue"], "error")
    assert "max_queue_time of 10 s" in end["error"]


def test_a_request_that_waits_alone_is_traced_though_no_step_runs(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json", scheduler="static")
    engine.add("waits", 20, 9, max_queue_time=3.0)
    while engine.core.has_work():
        engine.core.step()
    events = engine.events()
    assert track(events, "waits")[0] == ["queue"]
    assert not any(event["name"] == "execute" for event in events)


def test_the_track_of_a_request_that_ran_too_long_names_the_limit(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json")
    engine.add("runs", 20, 90, max_total_time=20.0)
    engine.run()
    phases, end = track(engine.events(), "runs")
    assert phases == ["queue", "prefill", "decode"]
    assert (end["finish_reason"], end["stop_reason"]) == ("length", "max_total_time")


def test_the_track_of_a_request_whose_step_failed_has_the_error(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json", BrokenExecutor(NUM_BLOCKS))
    engine.add("fails", 20, 9)
    engine.run()
    phases, end = track(engine.events(), "fails")
    assert (phases, end["finish_reason"]) == (["queue", "prefill"], "error")
    assert end["error"] == "the engine failed to compute a step: RuntimeError: no luck"


def test_what_is_left_when_the_engine_closes_has_its_track(tmp_path: Path) -> None:
    engine = TracedEngine(tmp_path / "trace.json", max_num_seqs=1)
    engine.add("runs", 20, 9)
    engine.add("waits", 20, 9)
    engine.core.step()
    events = engine.events()
    assert {track(events, name)[1]["finish_reason"] for name in ("runs", "waits")} == {"abort"}


def test_counters_follow_the_requests_and_the_blocks(tmp_path: Path) -> None:
    events = trace(tmp_path / "trace.json", (40, 2))
    counters = [(event["name"], event["args"]) for event in events if event["ph"] == "C"]
    assert Counter(name for name, _ in counters) == {"requests": 2, "KV blocks": 2}
    assert counters[1] == ("KV blocks", {"used": 3, "free": NUM_BLOCKS - 3})
    assert counters[-1] == ("KV blocks", {"used": 0, "free": NUM_BLOCKS})


def test_a_full_disk_ends_the_trace_and_not_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    engine = TracedEngine(Path("/dev/full"))
    engine.add("0", 20, 90)  # more than the file's buffer holds
    engine.run()
    assert [record.message for record in caplog.records] == [
        "the trace ends here, its file can't be written: [Errno 28] No space left on device"
    ]


def test_closing_a_trace_on_a_full_disk_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    StepTrace(Path("/dev/full")).close()
    assert "the trace ends here" in caplog.text
