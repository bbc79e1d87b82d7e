"""The engine's loop: schedule a step, execute it, take in its result."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shoal.engine.errors import EngineDeadError, describe
from shoal.executor.interface import Executor
from shoal.request import FinishReason, Request
from shoal.scheduler.interface import (
    BatchView,
    RequestOutput,
    ScheduledStep,
    Scheduler,
    SchedulerStats,
    StepResult,
)

MAX_CONSECUTIVE_FAILURES = 3
"""Steps that may fail in a row; after that the fault is the engine's, not a request's."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step that was computed, and when each part of it began.

    Times are seconds on the engine's clock. `stats` is the state after the step.
    """

    step: ScheduledStep
    schedule_start: float
    execute_start: float
    update_start: float
    update_end: float
    stats: SchedulerStats


class EngineObserver(Protocol):
    """Something that wants to know of every request and step; it must not raise."""

    def on_add(self, requests: Sequence[Request]) -> None:
        """The samples of a user's request have been queued."""

    def on_step(self, report: StepReport) -> None:
        """A step has been computed and taken in."""

    def on_end(self, output: RequestOutput) -> None:
        """A request has ended, in the step reported last or without one; its last output."""

    def close(self) -> None:
        """The engine is closed."""


class EngineCore:
    """A scheduler and an executor, driven step by step by the caller.

    Args:
        scheduler: decides what a step computes.
        executor: computes it; closed with the engine.
        clock: seconds, monotonic; the one that `Request.arrival_time` was read from.
        observers: told of each step and of each end of a request; closed with the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
        observers: Sequence[EngineObserver] = (),
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._observers = observers
        self._wake_time: float | None = None
        self._num_consecutive_failures = 0
        self._death: str | None = None  # why it can't go on

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the samples of a user's request: all or none.

        Raises:
            RequestRejectedError: they can never fit.
            QueueFullError: the queue hasn't room for all of them.
        """
        self._wake_time = None
        for index, request in enumerate(requests):
            try:
                self._scheduler.add(request)
            except Exception:
                self._take_out(added.request_id for added in requests[:index])
                raise
        for observer in self._observers:
            observer.on_add(requests)

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[RequestOutput]:
        """End requests now and free their blocks; unknown and ended ones are skipped.

        `reason` is what their outputs say: that of a stop string is known to their reader alone.
        """
        outputs = self._take_out(request_ids)
        for output in outputs:
            output.finish_reason = reason
        self._report_ends(outputs)
        return outputs

    def step(self) -> list[RequestOutput]:
        """Run one step; returns an output for each request that advanced or ended.

        When computing it fails, the step's requests end with `FinishReason.ERROR` and the engine
        goes on.

        Raises:
            EngineDeadError: it can't go on, because the scheduler failed or because
                `MAX_CONSECUTIVE_FAILURES` steps failed in a row.
        """
        start = self._clock()
        try:
            step = self._scheduler.schedule(start)
        except Exception as error:
            raise self._die(f"the scheduler failed: {describe(error)}") from error
        self._wake_time = None if step.requests else step.wake_time
        if step.ended:
            self._report_ends(step.ended)
        if not step.requests:
            return step.ended
        outputs = self._compute(step, start)
        self._report_ends(outputs)
        return step.ended + outputs

    def end_input(self) -> None:
        """No request comes until those that wait are done: a batch need not wait to fill."""
        self._wake_time = None
        self._scheduler.end_input()

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many. Running requests keep theirs."""
        return self._scheduler.reset_prefix_cache()

    @property
    def seconds_to_wait(self) -> float:
        """How long the next step would find nothing to do, if no request comes; may be infinite."""
        return 0.0 if self._wake_time is None else max(0.0, self._wake_time - self._clock())

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return self._scheduler.has_work()

    def stats(self) -> SchedulerStats:
        """A snapshot for the metrics."""
        return self._scheduler.stats()

    def view_batch(self, max_waiting: int) -> BatchView:
        """Who runs, and the first `max_waiting` of those who wait."""
        return self._scheduler.view_batch(max_waiting)

    def close(self) -> None:
        """End the requests that are left, stop the executor and release its memory."""
        try:
            self._end_all()
        except Exception as error:  # of a scheduler that has failed already
            _logger.error("the requests that are left can't be ended: %s", describe(error))
        self._executor.close()
        for observer in self._observers:
            observer.close()

    def _compute(self, step: ScheduledStep, schedule_start: float) -> list[RequestOutput]:
        execute_start = self._clock()
        try:
            result = self._executor.execute(step)
        except Exception as error:
            return self._fail(step, error)
        update_start = self._clock()
        outputs = self._update(step, result, update_start)
        if self._observers:
            report = StepReport(
                step,
                schedule_start,
                execute_start,
                update_start,
                self._clock(),
                self.stats(),
            )
            for observer in self._observers:
                observer.on_step(report)
        self._num_consecutive_failures = 0
        self._check_idle()
        return outputs

    def _fail(self, step: ScheduledStep, error: Exception) -> list[RequestOutput]:
        self._num_consecutive_failures += 1
        _logger.error("step %d failed", step.step_id, exc_info=error)
        if self._num_consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            raise self._die(
                f"{self._num_consecutive_failures} steps failed in a row, "
                f"the last with {describe(error)}"
            ) from error
        message = f"the engine failed to compute a step: {describe(error)}"
        failed = {scheduled.request.request_id: message for scheduled in step.requests}
        return self._update(step, StepResult(errors=failed), self._clock())

    def _update(self, step: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Let the scheduler take in a result; when it fails, nobody knows what it has taken in."""
        try:
            return self._scheduler.update(step, result, now)
        except Exception as error:
            raise self._die(f"the scheduler failed: {describe(error)}") from error

    def _die(self, reason: str) -> EngineDeadError:
        self._death = reason
        return EngineDeadError(reason)

    def _take_out(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """Take requests out of the scheduler, without a word to the observers."""
        now = self._clock()
        outputs = [self._scheduler.abort(request_id, now) for request_id in request_ids]
        self._check_idle()
        return [output for output in outputs if output is not None]

    def _end_all(self) -> None:
        """End what is left; of an engine that has died it is the fault."""
        view = self.view_batch(max_waiting=sys.maxsize)
        left = [progress.request_id for progress in (*view.running, *view.waiting)]
        self.abort(left, FinishReason.ABORT if self._death is None else FinishReason.ERROR)

    def _report_ends(self, outputs: Iterable[RequestOutput]) -> None:
        if not self._observers:
            return
        for output in outputs:
            if output.finish_reason is not None:
                for observer in self._observers:
                    observer.on_end(output)

    def _check_idle(self) -> None:
        """Report blocks that nobody holds any more but that never came back to the pool."""
        if not self._scheduler.has_work() and (num_lost := self.stats().num_blocks_used):
            _logger.error("%d KV blocks are held though no request is left", num_lost)
