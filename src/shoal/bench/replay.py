"""Replays requests at their times on an engine in this process, and keeps a record of its steps.

Nothing but the engine is measured: no HTTP, no process boundary. Requests are taken in between two
steps, as a server's engine takes them in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.bench.measure import RequestTimeline
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore, StepReport
from shoal.engine.inputs import InputProcessor
from shoal.engine.loading import load_engine, load_text_interface, model_limits
from shoal.model.loader import open_model
from shoal.model.registry import resolve
from shoal.request import Request, SamplingParams
from shoal.scheduler.interface import (
    QueueFullError,
    RequestOutput,
    ScheduledRequest,
    SchedulerStats,
)


class RowKind(StrEnum):
    """What a step computed for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    PADDING = "padding"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: when it ran, its rows by request id, and how full it was.

    Times are seconds after the start of the replay.
    """

    start: float
    end: float
    rows: dict[str, RowKind]
    num_tokens: int
    num_slots: int
    num_useful_slots: int  # rows that produced a wanted token
    num_blocks_used: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of the requests. `queue_times` are seconds from arrival to the first step."""

    timelines: list[RequestTimeline]
    queue_times: list[float]
    num_failed: int
    steps: list[StepRecord]
    stats: SchedulerStats


@dataclass(slots=True)
class _Progress:
    """What has been seen of one request."""

    request: Request
    token_times: list[float] = field(default_factory=list)  # when some came: one, or a batch's all
    num_tokens: int = 0
    queue_time: float = 0.0
    ended: bool = False


@dataclass(slots=True)
class _StepLog:
    """Observes the engine's steps."""

    start: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    num_useful_slots: int = 0  # of all steps so far

    def on_step(self, report: StepReport) -> None:
        step, stats = report.step, report.stats
        self.steps.append(
            StepRecord(
                start=report.execute_start - self.start,
                end=report.update_start - self.start,
                rows={row.request.request_id: _kind_of(row) for row in step.requests},
                num_tokens=step.num_scheduled_tokens,
                num_slots=step.num_slots,
                num_useful_slots=stats.num_useful_slots - self.num_useful_slots,
                num_blocks_used=stats.num_blocks_used,
                num_waiting=stats.num_requests_waiting,
            )
        )
        self.num_useful_slots = stats.num_useful_slots

    def close(self) -> None:
        pass


@dataclass(slots=True)
class ReplayEngine:
    """An engine to replay on; for one replay, so that figures and caches start from nothing.

    Raises:
        ConfigError, ModelError: it can't be built.
    """

    config: EngineConfig
    clock: Callable[[], float] = time.monotonic
    _core: EngineCore = field(init=False)
    _inputs: InputProcessor = field(init=False)
    _start: float = field(init=False, default=0.0)
    _log: _StepLog = field(init=False, default_factory=_StepLog)
    _progress: dict[str, _Progress] = field(init=False, default_factory=dict)
    _num_failed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        model = open_model(resolve(self.config.model))
        self._core, info = load_engine(self.config, model, [self._log])
        limits = model_limits(info, load_text_interface(model))
        self._inputs = InputProcessor(limits, self.config)

    def close(self) -> None:
        """Stop the engine and release its memory."""
        self._core.close()

    def run(
        self,
        prompts: Sequence[list[int]],
        max_tokens: Sequence[int],
        times: Sequence[float],
    ) -> Replay:
        """Generate `max_tokens[i]` tokens for `prompts[i]`, which arrives at `times[i]` seconds.

        The answers are greedy and always as long as asked. A refused request counts as failed.
        """
        self._start = self._log.start = self.clock()
        pending = deque(
            self._make_request(str(index), *question)
            for index, question in sorted(
                enumerate(zip(prompts, max_tokens, times, strict=True)), key=lambda item: item[1][2]
            )
        )
        while pending or self._core.has_work():
            self._take_in(pending)
            if self._core.has_work():
                self._note(self._core.step())
            self._sleep(pending)
        return self._result()

    def _make_request(
        self, request_id: str, prompt: list[int], max_tokens: int, arrival: float
    ) -> Request:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self._inputs.process(request_id, prompt, params, arrival_time=self._start + arrival)[
            0
        ]

    def _take_in(self, pending: deque[Request]) -> None:
        while pending and pending[0].arrival_time <= self.clock():
            request = pending.popleft()
            try:
                self._core.add([request])
            except QueueFullError:
                self._num_failed += 1
            else:
                self._progress[request.request_id] = _Progress(request)
        if not pending:
            self._core.end_input()

    def _sleep(self, pending: deque[Request]) -> None:
        """Wait until there is something to do: an arrival, or what the scheduler waits for."""
        waits = [self._core.seconds_to_wait] if self._core.has_work() else []
        if pending:
            waits.append(pending[0].arrival_time - self.clock())
        if waits and min(waits) > 0:
            time.sleep(min(waits))

    def _note(self, outputs: Sequence[RequestOutput]) -> None:
        now = self.clock()
        for output in outputs:
            progress = self._progress[output.request_id]
            if output.new_token_ids:
                progress.token_times.append(now - self._start)
                progress.num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                progress.ended = output.error is None
                if output.times is not None and output.times.first_scheduled is not None:
                    progress.queue_time = output.times.first_scheduled - output.times.arrival

    def _result(self) -> Replay:
        ended = [progress for progress in self._progress.values() if progress.ended]
        return Replay(
            timelines=[self._timeline(progress) for progress in ended],
            queue_times=[progress.queue_time for progress in ended],
            num_failed=self._num_failed + len(self._progress) - len(ended),
            steps=self._log.steps,
            stats=self._core.stats(),
        )

    def _timeline(self, progress: _Progress) -> RequestTimeline:
        return RequestTimeline(
            sent=progress.request.arrival_time - self._start,
            first_token=progress.token_times[0],
            last_token=progress.token_times[-1],
            num_input_tokens=progress.request.num_prompt_tokens,
            num_output_tokens=progress.num_tokens,
            chunk_times=progress.token_times,
            num_cached_tokens=progress.request.num_cached_tokens,
        )


def _kind_of(row: ScheduledRequest) -> RowKind:
    if row.is_padding:
        return RowKind.PADDING
    is_decode = row.num_computed_tokens >= row.request.num_prompt_tokens
    return RowKind.DECODE if is_decode else RowKind.PREFILL
