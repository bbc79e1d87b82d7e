"""Continuous (iteration-level) batching over KV blocks, with chunked prefill and preemption.

Introduced by Orca (Yu et al., OSDI 2022); blocks and recomputation after vLLM (Kwon et al.,
SOSP 2023); mixing decodes with prompt chunks after Sarathi-Serve (Agrawal et al., OSDI 2024).

There are no phases. A request needs `num_tokens - num_computed_tokens` tokens computed: one when
it decodes, more when its prompt is new or it was preempted. A step gives the decoding requests
their token, then the running prompts their next chunk, then admits waiting requests, until the
token budget or the seats are used up.

Why every request finishes: all queues use one order (`service_order`), the victim of a shortage
is the last running request of that order, and any single request fits the pool. So the first
running request never loses its blocks and advances in every step; when it ends another is first.
With nothing running the head of the queue is admitted, and it can be passed by only
`MAX_BYPASSES` others. Later arrivals can come before it by their priority, but only for a time,
since priorities age. Priority decides who is admitted and who is the victim of a shortage; a
running request never loses its seat to a more urgent one while there are blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shoal.config import EngineConfig
from shoal.kv.manager import KVCacheManager
from shoal.request import FinishReason, Request, RequestStatus
from shoal.scheduler.interface import (
    QueueFullError,
    RequestOutput,
    ScheduledRequest,
    ScheduledStep,
    SchedulerInvariantError,
    SchedulerStats,
    StepResult,
)
from shoal.scheduler.limits import LengthLimits
from shoal.scheduler.progress import advance, times_of
from shoal.scheduler.queue import RequestQueue

MAX_BYPASSES = 16
"""Later requests that may be admitted past a waiting one that is too large for the free blocks."""

WATERMARK_BLOCKS = 4
"""Blocks that admission leaves to each running request to grow into, unless it needs fewer.

Simulated on 96 requests over 250 blocks: with one block 7 % of all tokens are computed twice at
50-800 tokens in and 20-200 out, and 71 % at 20-100 in and 200-800 out; with four it is 1 % and
27 %. More blocks keep seats empty for longer than the recomputation would take.
"""

RETRY_AFTER_SECONDS = 1.0
"""When a client that was refused for a full queue should try again."""


@dataclass(slots=True)
class _StepPlan:
    """A step in the making: how many tokens each request gets."""

    token_budget: int
    shares: dict[Request, int] = field(default_factory=dict)
    num_tokens: int = 0
    preempted: list[Request] = field(default_factory=list)

    @property
    def num_tokens_left(self) -> int:
        return self.token_budget - self.num_tokens

    @property
    def num_prompts(self) -> int:
        return sum(share > 1 for share in self.shares.values())

    def grant(self, request: Request, share: int) -> None:
        self.shares[request] = share
        self.num_tokens += share

    def revoke(self, request: Request) -> None:
        self.num_tokens -= self.shares.pop(request, 0)


class ContinuousScheduler:
    """Decides anew in every step which requests run; the `Scheduler` of continuous batching.

    Args:
        config: `max_num_seqs`, `max_num_batched_tokens`, `enable_chunked_prefill`,
            `long_prefill_token_threshold` and `max_waiting_requests` are read.
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
        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue()
        self._running = RequestQueue()
        self._unreported_finished_ids: list[str] = []  # for the executor, with the next step
        self._num_steps = 0
        self._num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request; see `Scheduler.add`."""
        if request.request_id in self._requests:
            raise SchedulerInvariantError(f"request id {request.request_id!r} is in use")
        self._limits.check_prompt(request.num_prompt_tokens)
        if len(self._waiting) >= self._config.max_waiting_requests:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already, "
                f"the limit is {self._config.max_waiting_requests}",
                retry_after=RETRY_AFTER_SECONDS,
            )
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a request now and free its blocks; None when it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        output = RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)
        self._finish(request, output, now)
        return output

    def schedule(self, now: float) -> ScheduledStep:
        """Decide the next step: decodes, then running prompts, then admissions.

        A step that preempted admits nobody: its victim is first in line for what is free.
        """
        plan = _StepPlan(token_budget=self._config.max_num_batched_tokens)
        self._schedule_running(plan)
        if self._waiting and self._num_free_seats > 0 and not plan.preempted:
            self._admit_waiting(plan, now)
        self._check_plan(plan)
        return self._hand_over(plan)

    def update(self, step: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what the executor computed; returns an output for each request that advanced."""
        outputs = []
        for scheduled in step.requests:
            request = scheduled.request
            if request.status is not RequestStatus.RUNNING:  # aborted since the step was made
                continue
            output = advance(scheduled, result, self._limits.max_tokens, now)
            if output.finish_reason is not None:
                self._finish(request, output, now)
            if output.finish_reason or output.new_token_ids or output.prompt_logprobs:
                outputs.append(output)
        return outputs

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._requests)

    def stats(self) -> SchedulerStats:
        """A snapshot for the metrics."""
        return SchedulerStats(
            num_requests_running=len(self._running),
            num_requests_waiting=len(self._waiting),
            num_blocks_total=self._kv_cache.num_blocks,
            num_blocks_used=self._kv_cache.num_used_blocks,
            num_preemptions=self._num_preemptions,
        )

    # Running requests

    def _schedule_running(self, plan: _StepPlan) -> None:
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running:
            is_decoding = request.num_tokens - request.num_computed_tokens == 1
            (decoding if is_decoding else prefilling).append(request)
        for request in decoding + prefilling:
            if request.status is not RequestStatus.RUNNING:  # the victim of one before it
                continue
            chunk = self._chunk_of(request, plan)
            if chunk > 0 and (room := self._make_room(request, plan)) > 0:
                self._run(request, min(chunk, room), plan)

    def _make_room(self, request: Request, plan: _StepPlan) -> int:
        """Tokens that the free blocks let the request compute; preempts one victim if that is none.

        One victim is enough, for every running request holds a block. The request itself may be
        the victim; then it has no room.
        """
        if (room := self._kv_cache.room_for(request)) > 0:
            return room
        victim = self._running.last
        self._preempt(victim, plan)
        return 0 if victim is request else self._kv_cache.room_for(request)

    def _preempt(self, victim: Request, plan: _StepPlan) -> None:
        """Send a running request back to the queue; its tokens are kept and computed again."""
        self._kv_cache.free(victim)
        self._running.remove(victim)
        self._waiting.add_again(victim)
        plan.revoke(victim)
        plan.preempted.append(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._num_preemptions += 1

    def _chunk_of(self, request: Request, plan: _StepPlan) -> int:
        """Tokens that the budget and the settings grant the request in this step.

        Without chunked prefill a prompt runs whole or not at all. The first prompt of a step may
        then pass the token budget: otherwise one longer than the budget would never run.
        """
        num_missing = request.num_tokens - request.num_computed_tokens
        if not self._config.enable_chunked_prefill:
            fits = num_missing <= plan.num_tokens_left or plan.num_prompts == 0
            return num_missing if fits else 0
        limit = self._config.long_prefill_token_threshold or plan.token_budget
        return min(num_missing, limit, plan.num_tokens_left)

    # Waiting requests

    def _admit_waiting(self, plan: _StepPlan, now: float) -> None:
        """Start waiting requests while there are seats, budget and blocks for their whole prompt.

        One that is too large for the free blocks is passed over by later ones, but by no more
        than `MAX_BYPASSES`; then everything behind it waits until it fits.
        """
        num_unclaimed = self._kv_cache.num_free_blocks - sum(map(self._claim_of, self._running))
        passed_over: list[Request] = []
        for request in list(self._waiting):
            chunk = self._chunk_of(request, plan)
            if chunk == 0 or self._num_free_seats == 0:
                break
            # With nothing running all blocks are free, and the request fits (`LengthLimits`).
            if self._running and self._kv_cache.missing_blocks(request) > num_unclaimed:
                if request.num_bypasses >= MAX_BYPASSES:
                    break
                passed_over.append(request)
                continue
            num_unclaimed -= self._claim_of(request)
            self._start(request, chunk, plan, now)
            for large in passed_over:
                large.num_bypasses += 1

    @property
    def _num_free_seats(self) -> int:
        return self._config.max_num_seqs - len(self._running)

    def _claim_of(self, request: Request) -> int:
        """Blocks that the request's known tokens need beyond those it holds, and some to grow.

        The growth is the watermark that keeps a step from admitting what the next steps would have
        to preempt.
        """
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self._limits.max_tokens)
        num_known_blocks = self._kv_cache.blocks_for(request.num_tokens)
        growth = self._kv_cache.blocks_for(most_tokens) - num_known_blocks
        return self._kv_cache.missing_blocks(request) + min(growth, WATERMARK_BLOCKS)

    def _start(self, request: Request, chunk: int, plan: _StepPlan, now: float) -> None:
        self._waiting.remove(request)
        self._running.add(request)
        request.status = RequestStatus.RUNNING
        request.num_bypasses = 0
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        self._run(request, chunk, plan)

    def _run(self, request: Request, num_tokens: int, plan: _StepPlan) -> None:
        """Put a request into the step and take the blocks that it needs; they are free."""
        if not self._kv_cache.allocate_slots(request, num_tokens):
            raise SchedulerInvariantError(
                f"request {request.request_id!r} needs blocks for {num_tokens} more tokens, "
                f"{self._kv_cache.num_free_blocks} are free"
            )
        plan.grant(request, num_tokens)

    # The end of a request, and of a plan

    def _finish(self, request: Request, output: RequestOutput, now: float) -> None:
        """Take a request out of everything and complete its last output."""
        queue = self._running if request.status is RequestStatus.RUNNING else self._waiting
        queue.remove(request)
        del self._requests[request.request_id]
        self._kv_cache.free(request)
        request.status = RequestStatus.FINISHED
        if request.first_scheduled_time is not None:  # else the executor never saw it
            self._unreported_finished_ids.append(request.request_id)
        output.times = times_of(request, finished=now)
        output.num_cached_tokens = request.num_cached_tokens
        output.num_preemptions = request.num_preemptions

    def _check_plan(self, plan: _StepPlan) -> None:
        """Raise `SchedulerInvariantError` unless the plan keeps to the budgets and advances."""
        whole_prompt = not self._config.enable_chunked_prefill and plan.num_prompts == 1
        if plan.num_tokens > plan.token_budget and not whole_prompt:
            raise SchedulerInvariantError(
                f"{plan.num_tokens} tokens in a step, the budget is {plan.token_budget}"
            )
        if len(plan.shares) > self._config.max_num_seqs:
            raise SchedulerInvariantError(
                f"{len(plan.shares)} requests in a step, the limit is {self._config.max_num_seqs}"
            )
        if self._requests and not plan.shares and not plan.preempted:
            raise SchedulerInvariantError(f"{len(self._requests)} requests and none can advance")

    def _hand_over(self, plan: _StepPlan) -> ScheduledStep:
        step = ScheduledStep(
            step_id=self._num_steps,
            requests=[self._scheduled(request, share) for request, share in plan.shares.items()],
            preempted_request_ids=[request.request_id for request in plan.preempted],
        )
        if step.requests:  # an empty step isn't executed
            step.finished_request_ids = self._unreported_finished_ids
            self._unreported_finished_ids = []
        self._num_steps += 1
        return step

    def _scheduled(self, request: Request, share: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        return ScheduledRequest(
            request=request,
            token_ids=request.token_ids(start, start + share),
            num_computed_tokens=start,
            block_table=self._kv_cache.block_table(request),
            sample=start + share == request.num_tokens,
        )
