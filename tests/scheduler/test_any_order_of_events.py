"""Whatever arrives, is aborted or fails, and when: the rules hold and everybody finishes."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from driving import Driver, make_request
from fake_executor import next_token
from hypothesis import event, given, settings
from hypothesis import strategies as st

from shoal.request import FinishReason, RequestStatus
from shoal.scheduler import continuous
from shoal.scheduler.interface import QueueFullError, RequestRejectedError, ScheduledStep

MAX_WAITING = 8


@dataclass(frozen=True)
class Setting:
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    extra_budget: int  # tokens of a step beyond one for each seat
    chunk: int | None  # long_prefill_token_threshold; None: no chunked prefill
    watermark: int

    @property
    def budget(self) -> int:
        return self.max_num_seqs + self.extra_budget

    @property
    def max_request_tokens(self) -> int:
        return min(self.max_model_len, self.num_blocks * 16)

    def driver(self) -> Driver:
        return Driver(
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            settings={
                "max_num_seqs": self.max_num_seqs,
                "max_num_batched_tokens": self.budget,
                "enable_chunked_prefill": self.chunk is not None,
                "long_prefill_token_threshold": self.chunk or 0,
                "max_waiting_requests": MAX_WAITING,
            },
        )


@dataclass(frozen=True)
class Arrival:
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    has_stop: bool


@dataclass(frozen=True)
class Burst:
    arrivals: list[Arrival]


@dataclass(frozen=True)
class Abort:
    choice: int


@dataclass(frozen=True)
class Steps:
    count: int


@dataclass(frozen=True)
class FailingStep:
    choice: int


Event = Burst | Abort | Steps | FailingStep

SETTINGS = st.builds(
    Setting,
    num_blocks=st.integers(2, 16),
    max_model_len=st.integers(8, 300) | st.just(1000),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 60),
    chunk=st.none() | st.just(0) | st.integers(1, 20),
    watermark=st.sampled_from([0, continuous.WATERMARK_BLOCKS]),
)
PRIORITIES = st.integers(-1, 2)
GROWING = st.builds(Arrival, st.integers(1, 40), st.integers(30, 200), PRIORITIES, st.just(False))
STOPPING = st.builds(Arrival, st.integers(1, 40), st.integers(1, 200), PRIORITIES, st.just(True))
LONG_PROMPT = st.builds(Arrival, st.integers(1, 300), st.integers(1, 9), PRIORITIES, st.just(False))
EVENTS = (
    st.builds(Burst, st.lists(GROWING | STOPPING | LONG_PROMPT, min_size=1, max_size=5))
    | st.builds(Steps, st.integers(1, 60))
    | st.builds(Abort, st.integers(0, 100))
    | st.builds(FailingStep, st.integers(0, 100))
)


def arrive(driver: Driver, arrival: Arrival, setting: Setting) -> None:
    request = make_request(
        str(len(driver.requests)),
        arrival.num_prompt_tokens,
        arrival.max_tokens,
        arrival_time=driver.now,
        priority=arrival.priority,
        stop_token_ids=tuple(range(0, 1000, 20)) if arrival.has_stop else (),
    )
    try:
        driver.add(request)
    except RequestRejectedError:
        assert arrival.num_prompt_tokens + 1 > setting.max_request_tokens
    except QueueFullError:
        assert driver.scheduler.stats().num_requests_waiting >= MAX_WAITING


def happen(driver: Driver, event: Event, setting: Setting) -> list[ScheduledStep]:
    """Let the event happen; returns the steps that it brought."""
    match event:
        case Burst(arrivals):
            for arrival in arrivals:
                arrive(driver, arrival, setting)
        case Abort(choice) if driver.requests:
            driver.abort(str(choice % len(driver.requests)))
        case Steps(count):
            return [driver.step() for _ in range(count) if driver.scheduler.has_work()]
        case FailingStep(choice) if driver.scheduler.has_work():
            return [driver.step(fail=choice)]
    return []


def check_step(step: ScheduledStep, setting: Setting) -> None:
    assert step.requests, "a step without progress"
    assert len(step.requests) <= setting.max_num_seqs
    shares = [scheduled.num_scheduled_tokens for scheduled in step.requests]
    num_prompts = sum(share > 1 for share in shares)
    assert min(shares) >= 1
    assert sum(shares) <= setting.budget or (setting.chunk is None and num_prompts == 1)
    if setting.chunk:
        assert max(shares) <= setting.chunk
    scheduled = {scheduled.request.request_id for scheduled in step.requests}
    assert not scheduled & set(step.preempted_request_ids)


def check_blocks(driver: Driver) -> None:
    driver.kv_cache.check()
    for request in driver.requests.values():
        holds_blocks = bool(driver.kv_cache.block_table(request))
        assert holds_blocks == (request.status is RequestStatus.RUNNING)


def check_answers(driver: Driver, setting: Setting) -> None:
    """Every request has ended once, with the tokens that it would have got alone."""
    assert set(driver.finished) == set(driver.requests)
    for request in driver.requests.values():
        sequence = list(request.prompt_token_ids)
        for token_id in request.output_token_ids:
            assert token_id == next_token(request, sequence)
            sequence.append(token_id)
        if driver.reason_of(request.request_id) is FinishReason.LENGTH:
            room = setting.max_request_tokens - request.num_prompt_tokens
            assert len(request.output_token_ids) == min(request.max_tokens, room)


@settings(max_examples=200, deadline=None)
@given(SETTINGS, st.lists(EVENTS, min_size=5, max_size=40))
def test_the_rules_hold_and_everybody_finishes(setting: Setting, events: list[Event]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(continuous, "WATERMARK_BLOCKS", setting.watermark)
        driver = setting.driver()
        for happening in events:
            for step in happen(driver, happening, setting):
                check_step(step, setting)
            check_blocks(driver)
        driver.run()
    check_answers(driver, setting)
    event(f"preemptions: {min(driver.scheduler.stats().num_preemptions, 3)}")
