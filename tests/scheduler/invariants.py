"""What holds in every step of every strategy, and for every answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from driving import Driver
from fake_executor import next_token

from shoal.request import FinishReason, Request, RequestStatus
from shoal.scheduler import continuous
from shoal.scheduler.dynamic import MAX_PREFILL_TOKENS
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep
from shoal.scheduler.progress import finish_reason_after
from shoal.scheduler.queue import service_order

PROMPT_LIMITS = ("max_queue_time", "max_total_time")


@dataclass
class Ledger:
    """What the checks remember from step to step."""

    num_passed: dict[str, int] = field(default_factory=dict)  # by later ones, since it last waited


def max_request_tokens(driver: Driver) -> int:
    return min(driver.max_model_len, driver.num_blocks * 16)


def check_request_limits(driver: Driver, request: Request) -> bool:
    """Whether the prompt leaves room for a token."""
    return request.num_prompt_tokens + 1 <= max_request_tokens(driver)


def num_missing(request: Request) -> int:
    return request.num_tokens - request.num_computed_tokens


@dataclass
class StepCheck:
    """The state before a step, to judge the step by."""

    driver: Driver
    ledger: Ledger
    waiting: list[Request]
    running: list[Request]
    decoding: list[Request]
    num_short: int  # running requests that need a block to go on

    @classmethod
    def before(cls, driver: Driver, ledger: Ledger) -> StepCheck:
        alive = [r for r in driver.requests.values() if r.status is not RequestStatus.FINISHED]
        running = [r for r in alive if r.status is RequestStatus.RUNNING]
        return cls(
            driver=driver,
            ledger=ledger,
            waiting=[r for r in alive if r.status is not RequestStatus.RUNNING],
            running=running,
            decoding=[r for r in running if num_missing(r) == 1],
            num_short=sum(_needs_block(driver, r) for r in running),
        )

    def after(self, step: ScheduledStep) -> None:
        self._check_time_limits(step)
        self._check_rows(step.requests)
        if step.requests:
            assert step.wake_time is None
        else:
            self._check_that_nothing_could_run(step)
        if self.driver.config.scheduler == "continuous":
            self._check_continuous_budgets(step)
            self._check_preemptions(step)
            self._check_advance(step)
            self._check_bypasses()
        else:
            self._check_batch(step)

    # Every strategy

    def _check_time_limits(self, step: ScheduledStep) -> None:
        now, config = self.driver.now, self.driver.config
        for output in step.ended:
            request = self.driver.requests[output.request_id]
            reached = [_deadline(request, kind) <= now for kind in PROMPT_LIMITS]
            assert any(reached) or config.scheduler != "continuous"
        for request in self._alive():
            assert now < _deadline(request, "max_total_time")
            if config.queue_timeout_action == "reject" and request.first_scheduled_time is None:
                assert now < _deadline(request, "max_queue_time")

    def _check_rows(self, rows: list[ScheduledRequest]) -> None:
        assert len(rows) <= self.driver.config.max_num_seqs
        assert len({row.request.request_id for row in rows}) == len(rows)
        written: list[int] = []
        for row in rows:
            assert row.request.status is RequestStatus.RUNNING
            assert row.num_scheduled_tokens >= 1
            first = row.num_computed_tokens
            end = first + row.num_scheduled_tokens
            assert row.sample == (end == row.request.num_tokens)
            written += row.block_table[first // 16 : -(-end // 16)]
        assert len(set(written)) == len(written), "two rows write into one block"

    def _check_that_nothing_could_run(self, step: ScheduledStep) -> None:
        driver, waiting = self.driver, self._waiting()
        if not driver.scheduler.has_work():
            return
        if driver.config.scheduler == "continuous":
            assert step.preempted_request_ids, "a step without progress"
            return
        assert step.wake_time is not None
        assert step.wake_time > driver.now, "a step without progress"
        assert not self._running()
        assert 0 < len(waiting) < driver.config.max_num_seqs
        oldest = min(request.arrival_time for request in waiting)
        assert oldest + driver.config.queue_delay > driver.now
        for size in driver.config.preferred_batch_sizes:
            assert size > len(waiting)

    # Static and dynamic batching

    def _check_batch(self, step: ScheduledStep) -> None:
        config = self.driver.config
        assert not step.preempted_request_ids
        batch = self._running()
        assert len(batch) <= config.max_num_seqs
        num_prompt_tokens = sum(request.num_prompt_tokens for request in batch)
        if config.scheduler == "dynamic" and len(batch) > 1:
            assert num_prompt_tokens <= config.token_budget
        if any(num_missing(row.request) > 1 for row in step.requests):
            limit = MAX_PREFILL_TOKENS if config.scheduler == "dynamic" else config.token_budget
            assert step.num_scheduled_tokens <= min(config.token_budget, limit)
        if config.skip_padding:
            assert not any(row.is_padding for row in step.requests)
        if any(request in self.running for request in batch):  # nobody joins a running batch
            assert all(request in self.running for request in batch)

    # Continuous batching

    def _check_continuous_budgets(self, step: ScheduledStep) -> None:
        config = self.driver.config
        prefills = [row for row in step.requests if num_missing(row.request) > 1]
        num_prefill_tokens = sum(row.num_scheduled_tokens for row in prefills)
        budget = config.token_budget
        if config.enable_chunked_prefill or len(prefills) > 1:
            assert step.num_scheduled_tokens <= budget
            assert num_prefill_tokens <= (config.max_num_prefill_tokens or budget)
        if not config.enable_chunked_prefill:
            assert all(row.num_scheduled_tokens == num_missing(row.request) for row in prefills)
        if threshold := config.long_prefill_token_threshold:
            assert all(row.num_scheduled_tokens <= threshold for row in prefills)

    def _check_preemptions(self, step: ScheduledStep) -> None:
        preempted = [self.driver.requests[name] for name in step.preempted_request_ids]
        in_step = [row.request for row in step.requests]
        assert not set(preempted) & set(in_step)
        displaces = self.driver.config.enable_priority_preemption
        assert len(preempted) <= max(self.num_short, displaces), "two for one shortage"
        for victim in preempted:
            assert victim in self.running
            for other in self._running():
                if other in self.running:
                    assert service_order(other) <= service_order(victim)
        if preempted and not displaces:
            assert all(request in self.running for request in self._running()), "it admits"

    def _check_advance(self, step: ScheduledStep) -> None:
        """Those who decode get their token, and the first in line advances anyway."""
        still_running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        in_step = [row.request for row in step.requests]
        for request in self.decoding:
            if request in still_running and request not in in_step:
                # The blocks of a victim were all shared with others.
                assert step.preempted_request_ids
                assert self.driver.kv_cache.room_for(request) <= 0
        if still_running and not step.preempted_request_ids:
            first = min(map(service_order, still_running))
            assert any(service_order(request) == first for request in in_step)

    def _check_bypasses(self) -> None:
        """Nobody is passed too often; exact where no prefix is waited for."""
        admitted = [r for r in self._running() if r in self.waiting]
        num_passed = self.ledger.num_passed
        for request in self._waiting():
            if request not in self.waiting:
                num_passed[request.request_id] = 0
                continue
            order = service_order(request)
            num_later = sum(service_order(other) > order for other in admitted)
            total = num_passed.get(request.request_id, 0) + num_later
            num_passed[request.request_id] = total
            assert request.num_bypasses <= continuous.MAX_BYPASSES
            if request.cache_scope is None:
                assert total <= continuous.MAX_BYPASSES
        for request in admitted:
            num_passed.pop(request.request_id, None)

    def _alive(self) -> list[Request]:
        alive = self.waiting + self.running
        return [r for r in alive if r.status is not RequestStatus.FINISHED]

    def _running(self) -> list[Request]:
        return [r for r in self._alive() if r.status is RequestStatus.RUNNING]

    def _waiting(self) -> list[Request]:
        return [r for r in self._alive() if r.status is not RequestStatus.RUNNING]


def _needs_block(driver: Driver, request: Request) -> bool:
    return request.num_computed_tokens >= 16 * len(driver.kv_cache.block_table(request))


def _deadline(request: Request, kind: str) -> float:
    limit: float | None = getattr(request, kind)
    return float("inf") if limit is None else request.arrival_time + limit


# Answers


def answer_alone(request: Request, max_tokens: int) -> Iterable[tuple[int, FinishReason | None]]:
    """The tokens that a request gets when it has the engine to itself, each with its end."""
    alone = Request(
        request_id="alone",
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.sampling_params,
        max_tokens=request.max_tokens,
        seed=request.seed,
        sample_index=request.sample_index,
    )
    while True:
        token_id = next_token(alone, alone.token_ids(0, alone.num_tokens))
        alone.output_token_ids.append(token_id)
        reason = finish_reason_after(alone, max_tokens)
        yield token_id, reason
        if reason is not None:
            return


def check_answer(driver: Driver, request: Request) -> None:
    """A request has ended with what it would have got alone, or with a part of it."""
    outputs = [output for output in driver.outputs if output.request_id == request.request_id]
    token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
    alone = list(answer_alone(request, max_request_tokens(driver)))
    assert token_ids == [token_id for token_id, _ in alone][: len(token_ids)]
    last = outputs[-1]
    is_whole = last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) and (
        last.stop_reason is None
    )
    if is_whole:
        assert (len(token_ids), last.finish_reason) == (len(alone), alone[-1][1])
        _check_logprobs(request, outputs, token_ids)
    if last.finish_reason is FinishReason.ERROR:
        assert last.error
    _check_times(outputs)


def _check_logprobs(request: Request, outputs: list, token_ids: list[int]) -> None:
    if request.sampling_params.logprobs is not None:
        logprobs = [entry.token_id for output in outputs for entry in output.new_logprobs]
        assert logprobs == token_ids
    if request.sampling_params.prompt_logprobs is not None:
        scored = [entry.token_id for output in outputs for entry in output.prompt_logprobs]
        assert scored == request.prompt_token_ids[1:]


def _check_times(outputs: list) -> None:
    times = outputs[-1].times
    milestones = [times.arrival, times.first_scheduled, times.first_token, times.finished]
    passed = [time for time in milestones if time is not None]
    assert passed == sorted(passed)
