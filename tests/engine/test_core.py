from __future__ import annotations

import pytest
from fake_executor import FakeExecutor

from shoal.config import EngineConfig
from shoal.engine.core import MAX_CONSECUTIVE_FAILURES, EngineCore
from shoal.engine.errors import EngineDeadError
from shoal.kv.manager import KVCacheManager
from shoal.request import FinishReason, Request, SamplingParams
from shoal.scheduler.continuous import ContinuousScheduler
from shoal.scheduler.interface import (
    QueueFullError,
    RequestOutput,
    ScheduledStep,
    StepResult,
)


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


def request(name: str, max_tokens: int = 3) -> Request:
    return Request(name, [1, 2, 3], SamplingParams(), max_tokens=max_tokens, seed=0)


def core_with(executor: FakeExecutor, **settings: int) -> EngineCore:
    scheduler = ContinuousScheduler(EngineConfig(**settings), KVCacheManager(20), max_model_len=100)
    return EngineCore(scheduler, executor)


def run(core: EngineCore) -> dict[str, RequestOutput]:
    """Step until idle; returns the last output of each request."""
    last = {}
    while core.has_work():
        last.update({output.request_id: output for output in core.step()})
    return last


def test_all_requests_finish_and_no_block_is_held() -> None:
    core = core_with(FakeExecutor(20))
    core.add([request("a"), request("b", max_tokens=5)])
    outputs = run(core)
    assert {o.finish_reason for o in outputs.values()} == {FinishReason.LENGTH}
    assert core.stats().num_blocks_used == 0


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    core = core_with(FailingExecutor(1), max_num_seqs=1)
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


def test_an_idle_engine_reports_blocks_that_never_came_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCacheManager, "free", lambda self, request: None)
    core = core_with(FakeExecutor(20))
    core.add([request("a")])
    run(core)
    assert "1 KV blocks are held though no request is left" in caplog.text
