"""What every batching strategy does alike: the queue, its limits, and the end of a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import islice

from shoal.config import EngineConfig
from shoal.kv.manager import KVCacheManager
from shoal.kv.prefix_cache import PrefixMatch
from shoal.request import FinishReason, Request, RequestStatus
from shoal.scheduler.deadlines import DeadlineKind, Deadlines, DepartureRate
from shoal.scheduler.interface import (
    BatchView,
    QueueFullError,
    RequestOutput,
    ScheduledRequest,
    ScheduledStep,
    SchedulerInvariantError,
    SchedulerStats,
    StepResult,
)
from shoal.scheduler.limits import LengthLimits
from shoal.scheduler.progress import advance, progress_of, times_of
from shoal.scheduler.queue import RequestQueue


class SchedulerBase(ABC):
    """The common part of the strategies; a strategy adds `schedule` and `update`.

    Args:
        config: the settings of the strategy.
        kv_cache: the blocks that the requests share.
        max_model_len: most tokens of one request, prompt and output.
    """

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager, max_model_len: int) -> None:
        self._config = config
        self._kv_cache = kv_cache
        self._limits = LengthLimits(
            max_model_len=max_model_len,
            pool_tokens=kv_cache.num_blocks * kv_cache.block_size,
        )
        self._max_request_tokens = self._limits.max_tokens
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._input_ended = False
        self._deadlines = Deadlines()
        self._departures = DepartureRate()
        self._unreported_finished_ids: list[str] = []  # for the executor, with the next step
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_slots = 0
        self._num_useful_slots = 0
        self._num_prefill_tokens = 0
        self._num_preemptions = 0
        self._prefix_cache_queries = 0
        self._prefix_cache_hits = 0

    def add(self, request: Request) -> None:
        """Queue a request; see `Scheduler.add`."""
        if request.request_id in self._requests:
            raise SchedulerInvariantError(f"request id {request.request_id!r} is in use")
        self._limits.check_prompt(request.num_prompt_tokens)
        if len(self._waiting) >= self._config.max_waiting_requests:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already, "
                f"the limit is {self._config.max_waiting_requests}",
                retry_after=self._retry_after(),
            )
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._deadlines.add(request)
        self._input_ended = False

    def end_input(self) -> None:
        """No request comes until those that wait are done; see `Scheduler.end_input`."""
        self._input_ended = True

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a request now and free its blocks; None when it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        output = RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)
        self._end(request, output, now)
        return output

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many. Running requests keep theirs."""
        return self._kv_cache.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        """A snapshot for the metrics."""
        return SchedulerStats(
            num_requests_running=len(self._requests) - len(self._waiting),
            num_requests_waiting=len(self._waiting),
            num_blocks_total=self._kv_cache.num_blocks,
            num_blocks_used=self._kv_cache.num_used_blocks,
            num_preemptions=self._num_preemptions,
            num_blocks_cached=self._kv_cache.num_cached_blocks,
            prefix_cache_queries=self._prefix_cache_queries,
            prefix_cache_hits=self._prefix_cache_hits,
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_slots=self._num_slots,
            num_useful_slots=self._num_useful_slots,
            num_prefill_tokens=self._num_prefill_tokens,
        )

    def view_batch(self, max_waiting: int) -> BatchView:
        """Who runs, and the first `max_waiting` of those who wait."""
        running = [r for r in self._requests.values() if r.status is RequestStatus.RUNNING]
        return BatchView(
            running=[progress_of(request, self._is_done(request)) for request in running],
            waiting=[progress_of(request, False) for request in islice(self._waiting, max_waiting)],
        )

    # For the strategies

    @abstractmethod
    def _leave(self, request: Request) -> None:
        """Take a running request out of what the strategy keeps."""

    def _is_done(self, request: Request) -> bool:
        """Whether a running request has all its tokens and only keeps its place."""
        del request
        return False

    def _take_output(self, request: Request, now: float) -> RequestOutput:
        """What the strategy holds back of a request's answer, which is handed out now."""
        del now
        return RequestOutput(request_id=request.request_id)

    def _start(self, request: Request, now: float) -> None:
        """Let a waiting request run from now on."""
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        request.num_bypasses = 0
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now

    def _begin(self, request: Request, match: PrefixMatch) -> None:
        """Let a running request compute from behind the matched blocks onwards."""
        self._kv_cache.start(request, match)
        if request.num_preemptions > 0:
            return
        request.num_cached_tokens = request.num_computed_tokens
        # Samples that share among themselves, and prompts that need every token, ask for nothing.
        shares = request.cache_scope is not None and request.cache_scope[0] == "salt"
        if shares and request.sampling_params.prompt_logprobs is None:
            self._prefix_cache_queries += request.num_prompt_tokens
            self._prefix_cache_hits += request.num_cached_tokens

    def _take_slots(self, request: Request, num_tokens: int) -> None:
        """Take the blocks for the next `num_tokens`; the strategy knows that they are free."""
        if not self._kv_cache.allocate_slots(request, num_tokens):
            raise SchedulerInvariantError(
                f"request {request.request_id!r} needs blocks for {num_tokens} more tokens, "
                f"{self._kv_cache.num_free_blocks} are free"
            )

    def _take_in(
        self, scheduled: ScheduledRequest, result: StepResult, now: float
    ) -> RequestOutput:
        """Move a request forward by a step's result; others can find the blocks that it filled."""
        output = advance(scheduled, result, self._max_request_tokens, now)
        request = scheduled.request
        if request.num_computed_tokens % self._kv_cache.block_size < len(scheduled.token_ids):
            self._kv_cache.publish(request)
        self._num_useful_slots += len(output.new_token_ids)
        return output

    def _end(self, request: Request, output: RequestOutput, now: float) -> None:
        """Take a request out of everything and complete its last output."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._kv_cache.free(request)
        request.status = RequestStatus.FINISHED
        if request.first_scheduled_time is not None:  # else the executor never saw it
            self._unreported_finished_ids.append(request.request_id)
            self._departures.note(now)
        output.times = times_of(request, finished=now)
        output.num_cached_tokens = request.num_cached_tokens
        output.num_preemptions = request.num_preemptions

    def _end_overdue(self, now: float) -> list[RequestOutput]:
        """End, or move behind the others, the requests that have reached a time limit."""
        ended = []
        for kind, request in self._deadlines.reached(now):
            if request.status is RequestStatus.FINISHED:  # by its other limit, a moment ago
                continue
            if kind == "max_queue_time" and self._config.queue_timeout_action == "delay":
                self._waiting.remove(request)
                request.late_since = now
                self._waiting.add(request)
                continue
            output = self._take_output(request, now)
            if output.finish_reason is None:  # else it is done and waits for its batch
                self._cut(request, output, kind)
            self._end(request, output, now)
            ended.append(output)
        return ended

    def _cut(self, request: Request, output: RequestOutput, kind: DeadlineKind) -> None:
        """End an output at a time limit: as a refusal while there is no token, else as it is."""
        if request.output_token_ids:
            output.finish_reason = FinishReason.LENGTH
            output.stop_reason = kind
            return
        output.finish_reason = FinishReason.ERROR
        output.error = f"no token came within its {kind} of {getattr(request, kind):g} s"
        output.retry_after = self._retry_after()

    def _hand_over(
        self,
        requests: list[ScheduledRequest],
        *,
        num_slots: int,
        preempted: Iterable[Request] = (),
        ended: list[RequestOutput],
        wake_time: float | None = None,
    ) -> ScheduledStep:
        """The step in its final form; `num_slots` counts the rows that it occupies."""
        step = ScheduledStep(
            step_id=self._num_steps,
            requests=requests,
            preempted_request_ids=[request.request_id for request in preempted],
            ended=ended,
            wake_time=wake_time,
        )
        if not requests:  # it isn't executed
            return step
        step.num_slots = max(num_slots, self._config.max_num_seqs if self._waiting else 0)
        step.finished_request_ids = self._unreported_finished_ids
        self._unreported_finished_ids = []
        self._num_steps += 1
        self._num_scheduled_tokens += step.num_scheduled_tokens
        self._num_slots += step.num_slots
        return step

    def _scheduled(
        self, request: Request, num_tokens: int, *, is_padding: bool = False
    ) -> ScheduledRequest:
        start = request.num_computed_tokens
        if (num_left := request.num_prompt_tokens - start) > 0:
            self._num_prefill_tokens += min(num_tokens, num_left)
        return ScheduledRequest(
            request,
            request.token_ids(start, start + num_tokens),
            start,
            self._kv_cache.block_table(request),
            sample=start + num_tokens == request.num_tokens,
            is_padding=is_padding,
        )

    def _scheduled_decode(self, request: Request) -> ScheduledRequest:
        """The same for a request that lacks one token: nearly always the last of its output."""
        last_token_id = request.output_token_ids[-1:]
        if not last_token_id:
            return self._scheduled(request, 1)
        table = self._kv_cache.block_table(request)
        return ScheduledRequest(request, last_token_id, request.num_computed_tokens, table, True)

    def _retry_after(self) -> float:
        """When half of the queue will be gone."""
        return self._departures.time_for(len(self._waiting) // 2)
