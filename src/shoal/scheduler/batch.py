"""Batching whole requests: the common part of static and dynamic batching.

A batch is formed, computed to its end and released as a whole. First all its prompts are computed,
then its rows decode in lockstep until the slowest is done. A row that is done keeps its place: it
is computed on and thrown away, as in systems that can't take a row out of a running batch; with
`skip_padding` its place stays empty instead. Answers leave with their batch, so a client that
streams gets all its text at that moment.

Such systems reserve memory for the longest that a row may become, so that a batch never runs out of
it. So does this one: a batch takes as many requests as the pool could hold at their `max_tokens`,
and nothing is ever preempted.
"""

from __future__ import annotations

from abc import abstractmethod

from shoal.config import EngineConfig
from shoal.kv.manager import KVCacheManager
from shoal.request import Request, RequestStatus
from shoal.scheduler.base import SchedulerBase
from shoal.scheduler.interface import (
    RequestOutput,
    ScheduledRequest,
    ScheduledStep,
    SchedulerInvariantError,
    StepResult,
)


class BatchScheduler(SchedulerBase):
    """Runs one batch after the other; a strategy says when one is formed, and of how many."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager, max_model_len: int) -> None:
        super().__init__(config, kv_cache, max_model_len)
        self._batch: list[Request] = []  # in service order; done ones keep their place
        self._outputs: dict[str, RequestOutput] = {}  # what each row has so far

    def schedule(self, now: float) -> ScheduledStep:
        """Decide the next step of the batch; forms the next batch when there is none."""
        ended = self._end_overdue(now)
        if self._batch and not self._unfinished():  # those that were not done have been aborted
            ended += self._release(now)
        if not self._batch:
            self._form_batch(now)
        requests = self._next_rows() if self._batch else []
        if self._batch and not requests:
            raise SchedulerInvariantError(f"a batch of {len(self._batch)} and no row can advance")
        return self._hand_over(
            requests,
            num_slots=len(self._batch),
            ended=ended,
            wake_time=None if requests else self._wake_time(),
        )

    def update(self, step: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what the executor computed; returns the outputs of a batch that is done."""
        for scheduled in step.requests:
            request = scheduled.request
            # Aborted since the step was made, or padding.
            if request.status is not RequestStatus.RUNNING or self._is_done(request):
                continue
            output = self._take_in(scheduled, result, now)
            self._collect(request, output)
            if output.error is not None:  # nobody should wait for blocks that it announced
                self._kv_cache.free(request)
        return [] if self._unfinished() else self._release(now)

    def _max_prefill_tokens(self) -> int:
        """Most prompt tokens of one step."""
        return self._config.token_budget

    # Forming a batch

    @abstractmethod
    def _num_to_start(self, now: float) -> int:
        """How many of the waiting requests, in their order, to start now; 0 to wait on."""

    def _num_that_fit(self) -> int:
        """Waiting requests, in their order, that the pool can hold to their end; at least one."""
        num_blocks = 0
        for count, request in enumerate(self._waiting):
            most_tokens = request.num_prompt_tokens + request.max_tokens
            num_blocks += self._kv_cache.blocks_for(min(most_tokens, self._limits.max_tokens))
            if count == self._config.max_num_seqs or num_blocks > self._kv_cache.num_blocks:
                return count
        return len(self._waiting)

    def _is_full(self, count: int) -> bool:
        """Whether no more can join a batch of the first `count` waiting requests."""
        return count == self._config.max_num_seqs or count < len(self._waiting)

    def _has_waited_enough(self, now: float) -> bool:
        """Whether a batch starts though it isn't full."""
        return self._input_ended or now >= self._time_to_start()

    def _time_to_start(self) -> float:
        """When a batch starts that never fills; the delay counts from its oldest request."""
        oldest = min(request.arrival_time for request in self._waiting)
        return oldest + self._config.queue_delay

    def _wake_time(self) -> float | None:
        """When there may be something to do, if nothing comes before; None when nothing waits."""
        if not self._waiting:
            return None
        deadline = self._deadlines.next()
        start = self._time_to_start()
        return start if deadline is None else min(start, deadline)

    def _form_batch(self, now: float) -> None:
        if not self._waiting:
            return
        self._batch = list(self._waiting)[: self._num_to_start(now)]
        for request in self._batch:
            self._start(request, now)

    # Running a batch

    def _next_rows(self) -> list[ScheduledRequest]:
        prefilling = [request for request in self._unfinished() if not request.output_token_ids]
        if prefilling:
            return self._prefill_rows(prefilling)
        return [self._next_token_of(request) for request in self._batch if self._has_row(request)]

    def _prefill_rows(self, prefilling: list[Request]) -> list[ScheduledRequest]:
        """The next chunk of the prompts, in their order.

        One that begins with blocks that another of the batch is just computing waits for them.
        """
        rows: list[ScheduledRequest] = []
        num_tokens_left = self._max_prefill_tokens()
        for request in prefilling:
            if num_tokens_left == 0:
                break
            if not self._kv_cache.block_table(request):
                match = self._kv_cache.get_computed_blocks(request)
                if match.is_being_computed:
                    continue
                self._begin(request, match)
            num_tokens = min(request.num_tokens - request.num_computed_tokens, num_tokens_left)
            self._take_slots(request, num_tokens)
            rows.append(self._scheduled(request, num_tokens))
            num_tokens_left -= num_tokens
        return rows

    def _has_row(self, request: Request) -> bool:
        """Whether a row of the batch is computed in a decode step; failed ones never are."""
        if not self._is_done(request):
            return True
        return not self._config.skip_padding and self._outputs[request.request_id].error is None

    def _next_token_of(self, request: Request) -> ScheduledRequest:
        """The row's next token; of one that is done the token behind its last, again and again."""
        self._take_slots(request, 1)
        return self._scheduled(request, 1, is_padding=self._is_done(request))

    # Answers

    def _is_done(self, request: Request) -> bool:
        output = self._outputs.get(request.request_id)
        return output is not None and output.finish_reason is not None

    def _unfinished(self) -> list[Request]:
        return [request for request in self._batch if not self._is_done(request)]

    def _collect(self, request: Request, new: RequestOutput) -> None:
        """Add what is new to what is held back for the request."""
        held = self._outputs.setdefault(request.request_id, new)
        if held is new:
            return
        held.new_token_ids += new.new_token_ids
        held.new_logprobs = [*held.new_logprobs, *new.new_logprobs]
        held.prompt_logprobs = [*held.prompt_logprobs, *new.prompt_logprobs]
        held.finish_reason = new.finish_reason
        held.stop_token_id = new.stop_token_id
        held.error = new.error

    def _release(self, now: float) -> list[RequestOutput]:
        """End the batch; returns the answers of all its rows."""
        outputs = []
        for request in list(self._batch):
            output = self._take_output(request, now)
            self._end(request, output, now)
            outputs.append(output)
        return outputs

    def _take_output(self, request: Request, now: float) -> RequestOutput:
        output = self._outputs.pop(request.request_id, None)
        if output is None:
            return RequestOutput(request_id=request.request_id)
        if request.first_token_time is not None:
            request.first_token_time = now  # when anybody sees it
        return output

    def _leave(self, request: Request) -> None:
        self._batch.remove(request)
        self._outputs.pop(request.request_id, None)
