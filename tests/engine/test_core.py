from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from fake_executor import FakeExecutor

from shoal.config import EngineConfig
from shoal.engine.core import (
    MAX_CONSECUTIVE_FAILURES,
    EngineCore,
    EngineObserver,
    StepReport,
)
from shoal.engine.errors import EngineDeadError
from shoal.kv.manager import KVCacheManager
from shoal.request import FinishReason, Request, SamplingParams
from shoal.scheduler import create_scheduler
from shoal.scheduler.interface import (
    QueueFullError,
    RequestOutput,
    ScheduledStep,
    StepResult,
)

STRATEGIES = pytest.mark.parametrize("strategy", ["static", "dynamic", "continuous"])


class FailingExecutor(FakeExecutor):
    """Fails the first `num_failures` steps."""

    def __init__(self, num_failures: int) -> None:
        super().__init__(num_blocks=20)
        self.num_failures = num_failures

    def execute(self, step: ScheduledStep) -> StepResult:
        if self.num_failures > 0:
            self.num_failures -= 1
            raise RuntimeError("no\nluck")
        return super().execute(step)


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request(name: str, max_tokens: int = 3, **fields: Any) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(), max_tokens=max_tokens, seed=0, **fields)


def core_with(executor: FakeExecutor, **settings: Any) -> EngineCore:
    return core_at(Clock(), executor, **settings)


def core_at(
    clock: Clock,
    executor: FakeExecutor,
    *,
    observers: Sequence[EngineObserver] = (),
    **settings: Any,
) -> EngineCore:
    scheduler = create_scheduler(EngineConfig(**settings), num_blocks=20, max_model_len=100)
    return EngineCore(scheduler, executor, clock, observers)


def run(core: EngineCore) -> dict[str, RequestOutput]:
    """Step until idle; returns the last output of each request."""
    last = {}
    core.end_input()
    while core.has_work():
        last.update({output.request_id: output for output in core.step()})
    return last


@STRATEGIES
def test_all_requests_finish_and_no_block_is_held(strategy: str) -> None:
    core = core_with(FakeExecutor(20), scheduler=strategy)
    core.add([request("a"), request("b", max_tokens=5)])
    outputs = run(core)
    assert {o.finish_reason for o in outputs.values()} == {FinishReason.LENGTH}
    assert core.stats().num_blocks_used == 0


@STRATEGIES
def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(strategy: str) -> None:
    core = core_with(FailingExecutor(1), scheduler=strategy, max_num_seqs=1)
    core.add([request("a"), request("b")])
    outputs = run(core)
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert outputs["a"].error == "the engine failed to compute a step: RuntimeError: no luck"
    assert outputs["b"].finish_reason is FinishReason.LENGTH
    assert core.stats().num_blocks_used == 0


def test_an_engine_that_keeps_failing_declares_itself_dead() -> None:
    core = core_with(FailingExecutor(MAX_CONSECUTIVE_FAILURES), max_num_seqs=1)
    core.add([request(name) for name in "abcd"])
    with pytest.raises(EngineDeadError, match=r"3 steps failed in a row, .* no luck"):
        run(core)


def test_failures_with_successes_between_do_not_add_up() -> None:
    executor = FailingExecutor(0)
    core = core_with(executor)
    for index in range(2 * MAX_CONSECUTIVE_FAILURES):
        executor.num_failures = 1
        core.add([request(f"failing {index}")])
        run(core)
        core.add([request(f"fine {index}")])
        assert run(core)[f"fine {index}"].finish_reason is FinishReason.LENGTH


def test_samples_are_queued_all_or_none() -> None:
    core = core_with(FakeExecutor(20), max_waiting_requests=2)
    with pytest.raises(QueueFullError):
        core.add([request(name) for name in "abc"])
    assert not core.has_work()


def test_an_abort_ends_what_it_names_and_skips_what_it_does_not_know() -> None:
    core = core_with(FakeExecutor(20))
    core.add([request("a"), request("b")])
    core.step()
    (output,) = core.abort(["a", "unknown"])
    assert output.finish_reason is FinishReason.ABORT
    assert set(run(core)) == {"b"}


@STRATEGIES
def test_a_core_serves_one_call_after_the_other(strategy: str) -> None:
    core = core_with(FakeExecutor(20), scheduler=strategy)
    for _ in range(2):
        core.add([request("a"), request("b")])
        outputs = run(core)
        assert [outputs[name].finish_reason for name in "ab"] == [FinishReason.LENGTH] * 2


def test_a_scheduler_that_fails_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows then which outputs are lost: better no answer than half of the answers."""
    core = core_with(FakeExecutor(20))
    core.add([request("a")])
    monkeypatch.setattr("shoal.scheduler.base.advance", lambda *_: 1 // 0)
    with pytest.raises(EngineDeadError, match="the scheduler failed: ZeroDivisionError"):
        core.step()


def test_a_request_that_passes_its_time_limit_is_answered_without_a_step() -> None:
    clock, executor = Clock(), FakeExecutor(20)
    core = core_at(clock, executor, max_num_seqs=1)
    core.add([request("a", max_total_time=2.0)])
    clock.now = 2.0
    (output,) = core.step()
    assert (output.request_id, output.finish_reason) == ("a", FinishReason.ERROR)
    assert (core.has_work(), executor.steps) == (False, [])


def test_a_batch_that_waits_to_fill_says_for_how_long() -> None:
    clock = Clock()
    core = core_at(clock, FakeExecutor(20), scheduler="static", max_num_seqs=2, max_queue_delay=5.0)
    core.add([request("a")])
    assert core.seconds_to_wait == 0.0  # it hasn't been asked yet
    assert core.step() == []
    clock.now = 1.0
    assert core.seconds_to_wait == 4.0
    core.add([request("b", arrival_time=1.0)])
    assert core.seconds_to_wait == 0.0
    core.step()
    assert core.seconds_to_wait == 0.0  # it runs


def test_the_end_of_the_input_ends_the_waiting() -> None:
    core = core_with(FakeExecutor(20), scheduler="static", max_num_seqs=2)
    core.add([request("a")])
    core.step()
    assert core.seconds_to_wait == math.inf
    core.end_input()
    assert core.seconds_to_wait == 0.0
    assert set(run(core)) == {"a"}


class Observer:
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.reports: list[StepReport] = []
        self.ends: list[tuple[str, FinishReason | None]] = []
        self.closed = False

    def on_add(self, requests: Sequence[Request]) -> None:
        self.added += [request.request_id for request in requests]

    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)

    def on_end(self, output: RequestOutput) -> None:
        self.ends.append((output.request_id, output.finish_reason))

    def close(self) -> None:
        self.closed = True


def test_each_executed_step_is_reported_to_the_observers() -> None:
    observer = Observer()
    core = core_at(Clock(), FakeExecutor(20), observers=[observer])
    core.add([request("a", max_tokens=2)])
    assert observer.added == ["a"]
    run(core)
    assert [report.step.num_scheduled_tokens for report in observer.reports] == [3, 1]
    assert observer.reports[-1].stats == core.stats()
    core.close()
    assert observer.closed


@STRATEGIES
def test_each_end_is_reported_to_the_observers_once(strategy: str) -> None:
    observer = Observer()
    core = core_at(Clock(), FailingExecutor(1), observers=[observer], scheduler=strategy)
    core.add([request("fails")])
    run(core)
    core.add([request(name, max_tokens=2) for name in ("stops", "leaves", "ends")])
    core.end_input()
    core.step()
    core.abort(["leaves"])
    core.abort(["stops"], FinishReason.STOP)
    run(core)
    core.add([request("is left")])
    core.close()
    assert observer.ends == [
        ("fails", FinishReason.ERROR),
        ("leaves", FinishReason.ABORT),
        ("stops", FinishReason.STOP),
        ("ends", FinishReason.LENGTH),
        ("is left", FinishReason.ABORT),
    ]


def test_samples_that_are_refused_together_have_no_end() -> None:
    observer = Observer()
    core = core_at(Clock(), FakeExecutor(20), observers=[observer], max_waiting_requests=2)
    with pytest.raises(QueueFullError):
        core.add([request(name) for name in "abc"])
    assert observer.added == observer.ends == []


def test_what_an_engine_that_died_leaves_behind_ends_with_its_error() -> None:
    observer = Observer()
    executor = FailingExecutor(MAX_CONSECUTIVE_FAILURES)
    core = core_at(Clock(), executor, observers=[observer], max_num_seqs=1)
    core.add([request(name) for name in "abcd"])
    with pytest.raises(EngineDeadError):
        run(core)
    core.close()
    assert observer.ends == [(name, FinishReason.ERROR) for name in "abcd"]


def test_a_scheduler_that_has_failed_does_not_keep_the_engine_from_closing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor, observer = FakeExecutor(20), Observer()
    core = core_at(Clock(), executor, observers=[observer])
    core.add([request("a")])
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request: 1 // 0)
    core.close()
    assert "can't be ended: ZeroDivisionError" in caplog.text
    assert (executor.closed, observer.closed) == (True, True)


def test_an_idle_engine_reports_blocks_that_never_came_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request: None)
    core = core_with(FakeExecutor(20))
    core.add([request("a")])
    run(core)
    assert "1 KV blocks are held though no request is left" in caplog.text
