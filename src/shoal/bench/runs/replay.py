"""Replays requests at their times on an engine in this process, and keeps a record of its steps.

Nothing but the engine is measured: no HTTP, no process boundary. Requests are taken in between two
steps, as a server's engine takes them in.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.bench.client.load import REFUSED, Failure
from shoal.bench.results.measure import RequestTimeline
from shoal.bench.runs.outcome import Outcome
from shoal.bench.runs.patience import ENDLESS, Patience
from shoal.bench.runs.steps import EngineRecord, RowKind, StepRecord
from shoal.bench.workloads.workload import WorkloadRequest
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
    RequestRejectedError,
    ScheduledRequest,
    SchedulerStats,
)

REJECTED = "rejected"  # it can never fit the context or the KV pool


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of the requests. `queue_times` are seconds from arrival to the first step.

    `given_up` says that it ended early; requests under way are then in nothing but the steps.
    """

    timelines: list[RequestTimeline]
    queue_times: list[float]
    failures: list[Failure]
    steps: list[StepRecord]
    stats: SchedulerStats
    given_up: bool

    @property
    def num_failed(self) -> int:
        """Requests that brought no answer, refused ones included."""
        return len(self.failures)

    @property
    def outcome(self) -> Outcome:
        """The same in the form that runs against a server have too."""
        return Outcome(
            self.timelines,
            self.failures,
            EngineRecord(
                self.steps,
                self.queue_times,
                num_blocks=self.stats.num_blocks_total,
                num_preemptions=self.stats.num_preemptions,
            ),
        )


def replay_in_process(
    config: EngineConfig,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    patience: Patience = ENDLESS,
) -> Replay:
    """Replay `requests`, which arrive at `times` (seconds), on an engine made for it.

    Raises:
        ConfigError, ModelError: the engine can't be built.
        WorkloadError: the prompts are text.
    """
    engine = ReplayEngine(config)
    try:
        return engine.run(
            [request.prompt_token_ids for request in requests],
            [request.max_tokens for request in requests],
            times,
            patience,
        )
    finally:
        engine.close()


@dataclass(slots=True)
class _Progress:
    """What has been seen of one request."""

    request: Request
    token_times: list[float] = field(default_factory=list)  # when some came: one, or a batch's all
    num_tokens: int = 0
    queue_time: float = 0.0
    ended: bool = False
    error: str | None = None


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

    def on_add(self, requests: Sequence[Request]) -> None:
        pass

    def on_end(self, output: RequestOutput) -> None:
        pass

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
    _failures: list[Failure] = field(init=False, default_factory=list)
    _num_missed: int = field(init=False, default=0)  # ended requests that missed the SLO

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
        patience: Patience = ENDLESS,
    ) -> Replay:
        """Generate `max_tokens[i]` tokens for `prompts[i]`, which arrives at `times[i]` seconds.

        The answers are greedy and always as long as asked.
        """
        self._start = self._log.start = self.clock()
        questions = sorted(
            enumerate(zip(prompts, max_tokens, times, strict=True)), key=lambda item: item[1][2]
        )
        pending: deque[Request] = deque()
        for index, question in questions:
            pending.extend(self._make_requests(str(index), *question))
        while pending or self._core.has_work():
            self._take_in(pending)
            if self._core.has_work():
                self._note(self._core.step(), patience)
            if self._is_exhausted(patience):
                return self._result(given_up=True)
            self._sleep(pending)
        return self._result(given_up=False)

    def _make_requests(
        self, request_id: str, prompt: list[int], max_tokens: int, arrival: float
    ) -> list[Request]:
        """The one request of a question; none if it can never fit."""
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        arrival_time = self._start + arrival
        try:
            return self._inputs.process(request_id, prompt, params, arrival_time=arrival_time)
        except RequestRejectedError as error:
            self._failures.append(Failure(REJECTED, str(error)))
            return []

    def _take_in(self, pending: deque[Request]) -> None:
        while pending and pending[0].arrival_time <= self.clock():
            request = pending.popleft()
            try:
                self._core.add([request])
            except QueueFullError as error:
                self._failures.append(Failure(REFUSED, str(error)))
            except RequestRejectedError as error:
                self._failures.append(Failure(REJECTED, str(error)))
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

    def _is_exhausted(self, patience: Patience) -> bool:
        now = self.clock()
        if now - self._start > patience.max_seconds:
            return True
        if not patience.counts_misses:
            return False
        missed = sum(
            patience.is_missed(
                now - progress.request.arrival_time, has_token=bool(progress.token_times)
            )
            for progress in self._progress.values()
            if not progress.ended
        )
        return missed + self._num_missed + len(self._failures) > patience.max_misses

    def _note(self, outputs: Sequence[RequestOutput], patience: Patience) -> None:
        now = self.clock()
        for output in outputs:
            progress = self._progress[output.request_id]
            if output.new_token_ids:
                progress.token_times.append(now - self._start)
                progress.num_tokens += len(output.new_token_ids)
            if output.finish_reason is not None:
                progress.ended, progress.error = True, output.error
                if output.error is not None:
                    self._failures.append(Failure("error", output.error))
                elif not patience.slo.is_met_by(self._timeline(progress)):
                    self._num_missed += 1
                if output.times is not None and output.times.first_scheduled is not None:
                    progress.queue_time = output.times.first_scheduled - output.times.arrival

    def _result(self, *, given_up: bool) -> Replay:
        ended = [p for p in self._progress.values() if p.ended and p.error is None]
        return Replay(
            timelines=[self._timeline(progress) for progress in ended],
            queue_times=[progress.queue_time for progress in ended],
            failures=self._failures,
            steps=self._log.steps,
            stats=self._core.stats(),
            given_up=given_up,
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
