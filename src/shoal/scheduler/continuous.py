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
`MAX_BYPASSES` others. A request that waits for a prefix waits for a running one that computes it.
Later arrivals can come before it by their priority, but only for a time, since priorities age.
Priority decides who is admitted and who is the victim of a shortage; with
`enable_priority_preemption` also who keeps a seat.
"""

from __future__ import annotations

import msgspec

from shoal.config import EngineConfig
from shoal.kv.manager import KVCacheManager
from shoal.kv.prefix_cache import NO_MATCH, PrefixMatch
from shoal.request import Request, RequestStatus
from shoal.scheduler.base import SchedulerBase
from shoal.scheduler.interface import (
    RequestOutput,
    ScheduledStep,
    SchedulerInvariantError,
    StepResult,
)
from shoal.scheduler.queue import RequestQueue, service_order

MAX_BYPASSES = 16
"""Later requests that may be admitted past a waiting one that is too large for what is free."""

MAX_LOOKAHEAD = 32
"""Waiting requests that don't fit at which a step stops to look for one that does. Each costs a
look-up in the prefix cache, and a thousand may wait."""

SHARE_OF_SHORT_PROMPTS = 4
"""One part in so many of what a step has for prompts is kept from those longer than a step."""

WATERMARK_BLOCKS = 4
"""Blocks that admission leaves to each running request to grow into, unless it needs fewer.

Simulated on 96 requests over 250 blocks: with one block 7 % of all tokens are computed twice at
50-800 tokens in and 20-200 out, and 71 % at 20-100 in and 200-800 out; with four it is 1 % and
27 %. More blocks keep seats empty for longer than the recomputation would take.
"""


class _StepPlan(msgspec.Struct):
    """A step in the making: who decodes, and how many tokens of whose prompts are computed."""

    token_budget: int
    prefill_budget: int
    num_reserved_tokens: int = 0  # for prompts that aren't long
    decodes: list[Request] = []  # one token each
    prefills: dict[Request, int] = {}
    num_prefill_tokens: int = 0
    preempted: list[Request] = []

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def num_prefill_tokens_left(self) -> int:
        left = self.token_budget - self.num_tokens
        return min(left, self.prefill_budget - self.num_prefill_tokens)

    def add_prefill(self, request: Request, num_tokens: int) -> None:
        self.prefills[request] = self.prefills.get(request, 0) + num_tokens
        self.num_prefill_tokens += num_tokens

    def remove(self, request: Request) -> None:
        if request in self.decodes:
            self.decodes.remove(request)
        self.num_prefill_tokens -= self.prefills.pop(request, 0)


class ContinuousScheduler(SchedulerBase):
    """Decides anew in every step which requests run; the `Scheduler` of continuous batching."""

    def __init__(self, config: EngineConfig, kv_cache: KVCacheManager, max_model_len: int) -> None:
        super().__init__(config, kv_cache, max_model_len)
        self._token_budget = config.token_budget
        self._prefill_budget = config.max_num_prefill_tokens or config.token_budget
        self._running = RequestQueue()

    def schedule(self, now: float) -> ScheduledStep:
        """Decide the next step: decodes, then running prompts, then admissions.

        A step that was short of blocks admits nobody: its victim is first in line for what is free.
        """
        ended = self._end_overdue(now)
        plan = _StepPlan(self._token_budget, self._prefill_budget)
        self._schedule_running(plan)
        if self._waiting and not plan.preempted:
            self._admit_waiting(plan, now)
        self._spend_what_is_left(plan)
        self._check_plan(plan)
        rows = [self._scheduled_decode(request) for request in plan.decodes]
        for request, share in plan.prefills.items():
            rows.append(self._scheduled(request, share))
        return self._hand_over(
            rows,
            num_slots=len(rows),
            preempted=plan.preempted,
            ended=ended,
        )

    def update(self, step: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what the executor computed; returns an output for each request that advanced."""
        outputs = []
        running = RequestStatus.RUNNING  # the name of a member is slow to read
        for scheduled in step.requests:
            request = scheduled.request
            if request.status is not running:  # aborted since the step was made
                continue
            output = self._take_in(scheduled, result, now)
            if output.finish_reason is not None:
                self._end(request, output, now)
            if output.finish_reason or output.new_token_ids or output.prompt_logprobs:
                outputs.append(output)
        return outputs

    # Running requests

    def _schedule_running(self, plan: _StepPlan) -> None:
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self._running:
            (decoding if request.num_missing_tokens == 1 else prefilling).append(request)
        left_to_prompts = min(plan.token_budget - len(decoding), plan.prefill_budget)
        plan.num_reserved_tokens = left_to_prompts // SHARE_OF_SHORT_PROMPTS
        for request in decoding:
            # Nearly always in a block that it has begun, with nothing to take. All can have their
            # token (`EngineConfig` checks the budget).
            if request.num_computed_tokens % self._kv_cache.block_size:
                plan.decodes.append(request)
            else:
                self._advance(request, plan)
        for request in prefilling:
            self._advance(request, plan)

    def _advance(self, request: Request, plan: _StepPlan) -> None:
        """Give a running request its share of the step, at the cost of a victim if need be."""
        if request.status is not RequestStatus.RUNNING:  # the victim of one before it
            return
        num_tokens = self._share_of(request.num_missing_tokens, plan)
        if num_tokens > 0 and (room := self._make_room(request, plan)) > 0:
            self._run(request, min(num_tokens, room), plan)

    def _make_room(self, request: Request, plan: _StepPlan) -> int:
        """Tokens that the free blocks let the request compute; preempts one victim if that is none.

        The request has no room in this step when it is the victim itself, or when others share all
        blocks of the victim.
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
        plan.remove(victim)
        plan.preempted.append(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self._num_preemptions += 1

    def _share_of(self, num_missing: int, plan: _StepPlan) -> int:
        """Of a request's missing tokens those that the budget and the settings grant it.

        Without chunked prefill a prompt runs whole or not at all. The first prompt of a step may
        then pass the token budget: otherwise one longer than the budget would never run. With it,
        prompts that need more than one full step leave a part to the others, and each half of the
        rest to those behind it.
        """
        if num_missing == 1 and plan.num_tokens < plan.token_budget:
            return 1
        left = plan.num_prefill_tokens_left
        if not self._config.enable_chunked_prefill:
            return num_missing if num_missing <= left or not plan.prefills else 0
        if num_missing > min(plan.token_budget, plan.prefill_budget):
            left -= plan.num_reserved_tokens
            left = max(left // 2, min(left, 1))
        limit = self._config.long_prefill_token_threshold or plan.token_budget
        return max(0, min(num_missing, limit, left))

    def _leaves_budget_to_others(self, plan: _StepPlan) -> bool:
        """Whether a prompt that got nothing is too long for what is left, and others are not."""
        return self._config.enable_chunked_prefill and plan.num_prefill_tokens_left > 0

    def _spend_what_is_left(self, plan: _StepPlan) -> None:
        """Give running prompts the tokens that nobody else wanted, in their order."""
        if not self._config.enable_chunked_prefill or plan.preempted:
            return
        if len(plan.decodes) == len(self._running):
            return
        limit = self._config.long_prefill_token_threshold or plan.token_budget
        decoding = set(plan.decodes)
        for request in self._running:
            if request in decoding:
                continue
            share = plan.prefills.get(request, 0)
            more = min(
                request.num_missing_tokens - share,
                limit - share,
                plan.num_prefill_tokens_left,
                self._kv_cache.room_for(request) - share,
            )
            if more > 0:
                self._take_slots(request, share + more)
                plan.add_prefill(request, more)

    # Waiting requests

    def _admit_waiting(self, plan: _StepPlan, now: float) -> None:
        """Start waiting requests while there are seats, budget and blocks for their whole prompt.

        One that is too large for the free blocks, or too long for the part of the budget that long
        prompts may take, is passed over by later ones, but by no more than `MAX_BYPASSES`; then
        everything behind it waits until it fits. One whose prompt begins
        with blocks that are just being computed waits for them, and nobody counts as passing it.
        """
        if self._num_free_seats == 0 and not self._config.enable_priority_preemption:
            return
        num_unclaimed = self._kv_cache.num_free_blocks - sum(map(self._claim_of, self._running))
        passed_over: list[Request] = []
        for request in list(self._waiting):
            outranks = self._outranks_running(request)
            if self._num_free_seats == 0 and not outranks:
                break
            match = self._kv_cache.get_computed_blocks(request)
            if match.is_being_computed:
                continue
            num_cached = len(match.block_ids) * self._kv_cache.block_size
            share = self._share_of(request.num_tokens - num_cached, plan)
            # With nothing running all blocks are free, and the request fits (`LengthLimits`).
            num_missing_blocks = self._kv_cache.missing_blocks(request, match)
            has_place = self._num_free_seats > 0 and num_missing_blocks <= num_unclaimed
            if self._running and not has_place and outranks and self._would_fit(request, match):
                self._displace(request, match, plan, now)
                if request.status is RequestStatus.RUNNING:
                    _note_bypass(passed_over)
                break
            if share == 0 and not self._leaves_budget_to_others(plan):
                break
            if self._running and (not has_place or share == 0):
                passed_over.append(request)
                if request.num_bypasses >= MAX_BYPASSES or len(passed_over) == MAX_LOOKAHEAD:
                    break
                continue
            num_unclaimed -= self._claim_of(request, match)
            self._admit(request, match, share, plan, now)
            _note_bypass(passed_over)
            if any(large.num_bypasses >= MAX_BYPASSES for large in passed_over):
                break

    @property
    def _num_free_seats(self) -> int:
        return self._config.max_num_seqs - len(self._running)

    def _claim_of(self, request: Request, match: PrefixMatch = NO_MATCH) -> int:
        """Blocks that the request's known tokens need beyond those it holds, and some to grow.

        The growth is the watermark that keeps a step from admitting what the next steps would have
        to preempt.
        """
        most_tokens = min(request.num_prompt_tokens + request.max_tokens, self._limits.max_tokens)
        num_known_blocks = self._kv_cache.blocks_for(request.num_tokens)
        growth = self._kv_cache.blocks_for(most_tokens) - num_known_blocks
        return self._kv_cache.missing_blocks(request, match) + min(growth, WATERMARK_BLOCKS)

    def _outranks_running(self, request: Request) -> bool:
        """Whether a waiting request may take the place of the last running one."""
        if not self._config.enable_priority_preemption or not self._running:
            return False
        return _outranks(request, self._running.last)

    def _would_fit(self, request: Request, match: PrefixMatch) -> bool:
        """Whether there is room for the request beside those whose place it may not take.

        Otherwise preempting the others would bring it nothing.
        """
        staying = list(self._running)
        while staying and _outranks(request, staying[-1]):
            staying.pop()
        held = {block_id for other in staying for block_id in self._kv_cache.block_table(other)}
        num_shared = sum(block_id in held for block_id in match.block_ids)
        num_missing = self._kv_cache.blocks_for(request.num_tokens) - num_shared
        num_unclaimed = self._kv_cache.num_blocks - len(held) - sum(map(self._claim_of, staying))
        return not staying or num_missing <= num_unclaimed

    def _displace(self, request: Request, match: PrefixMatch, plan: _StepPlan, now: float) -> None:
        """Preempt the last running request, and admit the waiting one if that makes room for it.

        If not, the next step takes another victim: one a step.
        """
        self._preempt(self._running.last, plan)
        num_unclaimed = self._kv_cache.num_free_blocks - sum(map(self._claim_of, self._running))
        if self._kv_cache.missing_blocks(request, match) > num_unclaimed and self._running:
            return
        num_cached = len(match.block_ids) * self._kv_cache.block_size
        share = self._share_of(request.num_tokens - num_cached, plan)
        if share > 0:
            self._admit(request, match, share, plan, now)

    def _admit(
        self, request: Request, match: PrefixMatch, share: int, plan: _StepPlan, now: float
    ) -> None:
        self._start(request, now)
        self._begin(request, match)
        self._running.add(request)
        self._run(request, share, plan)

    def _run(self, request: Request, num_tokens: int, plan: _StepPlan) -> None:
        """Put a request into the step and take the blocks that it needs; they are free."""
        self._take_slots(request, num_tokens)
        if request.num_missing_tokens == 1:
            plan.decodes.append(request)
        else:
            plan.add_prefill(request, num_tokens)

    def _leave(self, request: Request) -> None:
        self._running.remove(request)

    def _check_plan(self, plan: _StepPlan) -> None:
        """Raise `SchedulerInvariantError` unless the plan keeps to the budgets and advances."""
        whole_prompt = not self._config.enable_chunked_prefill and len(plan.prefills) == 1
        if not whole_prompt and (
            plan.num_tokens > plan.token_budget or plan.num_prefill_tokens > plan.prefill_budget
        ):
            raise SchedulerInvariantError(
                f"{plan.num_tokens} tokens in a step, {plan.num_prefill_tokens} of them prefill; "
                f"the budgets are {plan.token_budget} and {plan.prefill_budget}"
            )
        num_requests = len(plan.decodes) + len(plan.prefills)
        if num_requests > self._config.max_num_seqs:
            raise SchedulerInvariantError(
                f"{num_requests} requests in a step, the limit is {self._config.max_num_seqs}"
            )
        if self._requests and num_requests == 0 and not plan.preempted:
            raise SchedulerInvariantError(f"{len(self._requests)} requests and none can advance")


def _outranks(request: Request, other: Request) -> bool:
    """Whether a request may take another's place; one that has aged enough keeps it."""
    return request.priority < other.priority and service_order(request) < service_order(other)


def _note_bypass(passed_over: list[Request]) -> None:
    for request in passed_over:
        request.num_bypasses += 1
