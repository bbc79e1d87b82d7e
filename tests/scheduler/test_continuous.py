"""What a step of continuous batching computes, and for whom."""

from __future__ import annotations

import pytest
from driving import Driver, make_request, shares

from shoal.config import ConfigError, EngineConfig
from shoal.request import FinishReason
from shoal.scheduler import continuous
from shoal.scheduler.continuous import MAX_BYPASSES
from shoal.scheduler.interface import (
    QueueFullError,
    RequestRejectedError,
    SchedulerInvariantError,
    StepResult,
)


def test_a_prompt_is_computed_in_one_step_and_then_decoded_token_by_token() -> None:
    driver = Driver()
    driver.add(make_request("a", 20, max_tokens=3))
    assert [shares(driver.step()) for _ in range(3)] == [{"a": 20}, {"a": 1}, {"a": 1}]
    assert not driver.scheduler.has_work()
    assert len(driver.tokens_of("a")) == 3


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 32})
    driver.add(make_request("a", 40, max_tokens=1))
    first, second = driver.step(), driver.step()
    assert [first.requests[0].sample, second.requests[0].sample] == [False, True]
    assert second.requests[0].num_computed_tokens == 32


def test_requests_join_while_others_decode_and_leave_when_they_finish() -> None:
    driver = Driver()
    driver.add(make_request("a", 5, max_tokens=4))
    driver.step()
    driver.add(make_request("b", 6, max_tokens=2, arrival_time=driver.now))
    assert [shares(driver.step()) for _ in range(3)] == [
        {"a": 1, "b": 6},
        {"a": 1, "b": 1},
        {"a": 1},
    ]


def test_a_finished_seat_is_taken_in_the_next_step() -> None:
    driver = Driver(settings={"max_num_seqs": 1})
    driver.add(make_request("a", 5, max_tokens=1), make_request("b", 5, max_tokens=1))
    assert [shares(driver.step()) for _ in range(2)] == [{"a": 5}, {"b": 5}]


def test_a_step_keeps_to_the_token_budget() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 64})
    driver.add(*(make_request(name, 50, max_tokens=2) for name in "abc"))
    assert shares(driver.step()) == {"a": 50, "b": 14}
    assert shares(driver.step()) == {"a": 1, "b": 36, "c": 27}


def test_decodes_come_before_prompts_that_arrived_earlier() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 32, "long_prefill_token_threshold": 16})
    driver.add(make_request("long", 300), make_request("short", 4))
    assert shares(driver.step()) == {"long": 16, "short": 4}
    for _ in range(5):
        assert shares(driver.step()) == {"short": 1, "long": 16}


def test_a_long_prompt_costs_a_running_stream_one_chunk_a_step() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 32})
    driver.add(make_request("stream", 4))
    driver.step()
    # Even a more urgent one.
    driver.add(make_request("long", 900, max_tokens=1, arrival_time=driver.now, priority=-1))
    driver.step_until(lambda step: "long" in driver.finished)
    for step in driver.executor.steps[1:]:
        assert shares(step)["stream"] == 1
        assert step.num_scheduled_tokens <= 32
    assert len(driver.executor.steps) == 1 + 900 // 31 + 1


def test_the_long_prefill_threshold_leaves_budget_to_short_prompts() -> None:
    driver = Driver(
        num_blocks=600,
        settings={"max_num_batched_tokens": 512, "long_prefill_token_threshold": 256},
    )
    driver.add(make_request("long", 8000), *(make_request(name, 10) for name in "abc"))
    assert shares(driver.step()) == {"long": 256, "a": 10, "b": 10, "c": 10}


def test_without_chunked_prefill_a_prompt_runs_whole() -> None:
    driver = Driver(settings={"enable_chunked_prefill": False, "max_num_batched_tokens": 64})
    driver.add(make_request("a", 50), make_request("b", 50), make_request("c", 10))
    assert shares(driver.step()) == {"a": 50}
    assert shares(driver.step()) == {"a": 1, "b": 50, "c": 10}


def test_without_chunked_prefill_a_prompt_above_the_budget_runs_as_the_only_prompt() -> None:
    driver = Driver(settings={"enable_chunked_prefill": False, "max_num_batched_tokens": 64})
    driver.add(make_request("a", 10), make_request("huge", 200), make_request("b", 10))
    assert shares(driver.step()) == {"a": 10}
    assert shares(driver.step()) == {"a": 1, "huge": 200}
    assert shares(driver.step()) == {"a": 1, "huge": 1, "b": 10}


def test_a_threshold_without_chunked_prefill_is_refused() -> None:
    with pytest.raises(ConfigError, match="long_prefill_token_threshold"):
        EngineConfig(enable_chunked_prefill=False, long_prefill_token_threshold=8)


def test_the_most_urgent_waiting_request_is_admitted_first() -> None:
    driver = Driver(settings={"max_num_seqs": 1})
    driver.add(
        make_request("normal", 5, max_tokens=1),
        make_request("urgent", 5, max_tokens=1, priority=-1),
    )
    assert shares(driver.step()) == {"urgent": 5}


# Refusals


def test_a_prompt_that_exceeds_the_pool_is_refused_with_both_numbers() -> None:
    driver = Driver(num_blocks=7, max_model_len=256)
    with pytest.raises(RequestRejectedError, match=r"120 tokens .* the KV pool holds 112 tokens"):
        driver.add(make_request("big", 120))
    driver.add(make_request("small", 5, max_tokens=2))
    driver.run()
    assert driver.reason_of("small") is FinishReason.LENGTH


def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers() -> None:
    driver = Driver(max_model_len=128)
    with pytest.raises(RequestRejectedError, match=r"128 tokens .* the context is 128 tokens"):
        driver.add(make_request("a", 128))


def test_a_prompt_one_short_of_the_context_gets_one_token() -> None:
    driver = Driver(max_model_len=128)
    driver.add(make_request("a", 127, ignore_eos=True))
    driver.run()
    assert len(driver.tokens_of("a")) == 1
    assert driver.reason_of("a") is FinishReason.LENGTH


def test_a_request_that_outgrows_the_pool_ends_with_length() -> None:
    driver = Driver(num_blocks=4)
    driver.add(make_request("a", 40))
    driver.run()
    assert driver.reason_of("a") is FinishReason.LENGTH
    assert len(driver.tokens_of("a")) == 4 * 16 - 40


def test_the_queue_refuses_what_exceeds_its_limit_and_serves_the_rest() -> None:
    driver = Driver(settings={"max_waiting_requests": 3, "max_num_seqs": 1})
    driver.add(*(make_request(name, 5, max_tokens=2) for name in "abc"))
    with pytest.raises(QueueFullError, match="3 requests wait already, the limit is 3") as refusal:
        driver.add(make_request("d", 5))
    assert refusal.value.retry_after > 0
    driver.run()
    assert set(driver.finished) == {"a", "b", "c"}


def test_a_request_id_in_use_is_refused() -> None:
    driver = Driver()
    driver.add(make_request("a", 5))
    with pytest.raises(SchedulerInvariantError, match="'a' is in use"):
        driver.add(make_request("a", 5))


# Admission by blocks


def test_admission_looks_at_the_whole_prompt() -> None:
    driver = Driver(num_blocks=8, settings={"max_num_batched_tokens": 32})
    driver.add(make_request("a", 80, max_tokens=1), make_request("b", 80, max_tokens=1))
    driver.step_until(lambda step: "a" in driver.finished)
    for step in driver.executor.steps:  # b had room for a chunk, but not for its prompt
        assert "b" not in shares(step)
    assert shares(driver.step()) == {"b": 32}


def test_admission_leaves_room_for_running_requests_to_grow() -> None:
    driver = Driver(num_blocks=4)
    driver.add(make_request("a", 16, max_tokens=33))
    driver.step()
    driver.add(make_request("b", 32, max_tokens=1, arrival_time=driver.now))
    assert "b" not in shares(driver.step())
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


def test_small_requests_pass_a_large_one_that_does_not_fit() -> None:
    driver = Driver(num_blocks=8)
    driver.add(make_request("a", 80, max_tokens=2))  # leaves 3 blocks
    driver.step()
    driver.add(
        make_request("large", 90, max_tokens=1, arrival_time=1.0),
        make_request("b", 10, max_tokens=1, arrival_time=2.0),
        make_request("c", 10, max_tokens=1, arrival_time=3.0),
    )
    assert shares(driver.step()) == {"a": 1, "b": 10, "c": 10}
    assert shares(driver.step()) == {"large": 90}


def test_a_large_request_is_passed_only_so_often() -> None:
    driver = Driver(num_blocks=16)
    driver.add(make_request("holder", 40, max_tokens=80))
    driver.step()
    driver.add(make_request("large", 200, max_tokens=2, arrival_time=driver.now))
    for index in range(50):
        driver.add(make_request(f"small-{index}", 4, max_tokens=1, arrival_time=driver.now))
        driver.step()
    assert len(driver.finished) == MAX_BYPASSES
    driver.step_until(lambda step: "holder" in driver.finished)
    assert next(iter(shares(driver.step()))) == "large"


def test_an_idle_pool_admits_the_head_at_once() -> None:
    driver = Driver(num_blocks=8)
    driver.add(make_request("a", 100), make_request("b", 100))
    driver.step()
    driver.abort("a")
    assert shares(driver.step()) == {"b": 100}


# Preemption


@pytest.fixture
def eager_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit without room to grow, so that requests run into each other."""
    monkeypatch.setattr(continuous, "WATERMARK_BLOCKS", 0)


@pytest.mark.usefixtures("eager_admission")
def test_a_shortage_preempts_the_latest_of_the_lowest_priority_alone() -> None:
    driver = Driver(num_blocks=6)
    driver.add(
        make_request("low", 30, priority=1, arrival_time=0.0),
        make_request("early", 30, arrival_time=1.0),
        make_request("late", 30, arrival_time=2.0),
    )
    for _ in range(3):
        assert driver.step().preempted_request_ids == []
    step = driver.step()  # the tokens at position 32 need a third block each
    assert step.preempted_request_ids == ["low"]
    assert shares(step) == {"early": 1, "late": 1}
    step = driver.step_until(lambda step: bool(step.preempted_request_ids))
    assert step.preempted_request_ids == ["late"]


@pytest.mark.usefixtures("eager_admission")
def test_a_preempted_request_resumes_and_says_the_same() -> None:
    alone = Driver()
    alone.add(make_request("b", 30, max_tokens=40, arrival_time=1.0))
    alone.run()

    crowded = Driver(num_blocks=6, settings={"max_num_batched_tokens": 48})
    crowded.add(
        make_request("a", 30, max_tokens=60), make_request("b", 30, max_tokens=40, arrival_time=1.0)
    )
    crowded.run()
    assert crowded.requests["b"].num_preemptions > 0
    assert crowded.finished["b"].num_preemptions == crowded.requests["b"].num_preemptions
    assert crowded.tokens_of("b") == alone.tokens_of("b")


@pytest.mark.usefixtures("eager_admission")
def test_a_preempted_request_goes_ahead_of_those_that_came_with_it() -> None:
    driver = Driver(num_blocks=4, settings={"max_num_seqs": 2})
    driver.add(make_request("a", 30, max_tokens=10), make_request("b", 30, max_tokens=10))
    driver.add(make_request("c", 30, max_tokens=1))
    driver.step_until(lambda step: bool(step.preempted_request_ids))
    driver.step_until(lambda step: "a" in driver.finished)
    assert list(shares(driver.step())) == ["b"]


@pytest.mark.usefixtures("eager_admission")
def test_a_step_that_preempts_admits_nobody() -> None:
    driver = Driver(num_blocks=8)
    driver.add(make_request("a", 60), make_request("b", 60, arrival_time=1.0))
    driver.step()
    driver.add(make_request("large", 120, arrival_time=2.0), make_request("c", 5, arrival_time=3.0))
    step = driver.step_until(lambda step: bool(step.preempted_request_ids))
    assert step.preempted_request_ids == ["b"]
    assert shares(step) == {"a": 1}
    assert shares(driver.step()) == {"a": 1, "c": 5}


@pytest.mark.usefixtures("eager_admission")
def test_prompt_logprobs_come_once_though_a_preemption_computes_them_again() -> None:
    driver = Driver(num_blocks=7, settings={"max_num_batched_tokens": 40})
    driver.add(
        make_request("a", 70, max_tokens=20),
        make_request("b", 20, max_tokens=20, prompt_logprobs=1, arrival_time=1.0),
    )
    seen = []
    while driver.scheduler.has_work():
        step = driver.scheduler.schedule(driver.now)
        for output in driver.scheduler.update(step, driver.executor.execute(step), driver.now):
            if output.request_id == "b":
                seen += output.prompt_logprobs
    assert driver.requests["b"].num_preemptions > 0
    assert [logprob.token_id for logprob in seen] == driver.requests["b"].prompt_token_ids[1:]


@pytest.mark.usefixtures("eager_admission")
def test_a_victim_that_already_has_a_place_in_the_step_loses_it() -> None:
    driver = Driver(num_blocks=6, settings={"long_prefill_token_threshold": 8})
    driver.add(make_request("prompt", 80), make_request("stream", 10, arrival_time=1.0))
    # The stream's second block was meant for the end of the prompt.
    step = driver.step_until(lambda step: bool(step.preempted_request_ids))
    assert step.preempted_request_ids == ["stream"]
    assert shares(step) == {"prompt": 8}


def test_a_full_pool_with_arrivals_every_step_drains() -> None:
    driver = Driver(num_blocks=20)
    for index in range(8):
        driver.add(make_request(str(index), 48, max_tokens=64, arrival_time=driver.now))
        step = driver.step()
        assert step.requests or len(step.preempted_request_ids) == 1
    driver.run()
    assert all(len(driver.tokens_of(str(index))) == 64 for index in range(8))


# Under pressure


def test_after_a_failed_step_an_idle_pool_admits_the_head_at_once() -> None:
    driver = Driver(num_blocks=8)
    driver.add(make_request("a", 100), *(make_request(name, 100, max_tokens=1) for name in "bcdef"))
    step = driver.schedule()
    driver.update(step, StepResult(errors={"a": "no memory"}))
    assert driver.kv_cache.num_used_blocks == 0
    assert shares(driver.step()) == {"b": 100}
    driver.run()


def test_a_step_looks_for_one_that_fits_among_the_first_only() -> None:
    driver = Driver(num_blocks=40)
    driver.add(make_request("holder", 300, max_tokens=300))
    driver.step()
    for index in range(continuous.MAX_LOOKAHEAD):
        driver.arrive(f"large {index}", 600, max_tokens=1)
    driver.arrive("small", 3, max_tokens=1)
    assert shares(driver.step()) == {"holder": 1}
    driver.abort("large 5")
    assert shares(driver.step()) == {"holder": 1, "small": 3}


def test_twice_as_much_work_as_the_pool_holds_costs_little_recomputation() -> None:
    driver = Driver(num_blocks=100)  # 1,600 tokens; 32 seats want 3,200
    for index in range(200):
        driver.arrive(f"{index}", 40 + index * 37 % 40, max_tokens=20 + index * 53 % 60)
    driver.run()
    stats = driver.scheduler.stats()
    num_needed = sum(request.num_tokens - 1 for request in driver.requests.values())
    assert stats.num_preemptions == sum(r.num_preemptions for r in driver.requests.values())
    assert stats.num_preemptions <= 20
    assert stats.num_scheduled_tokens <= 1.02 * num_needed
    assert all(len(driver.tokens_of(name)) == r.max_tokens for name, r in driver.requests.items())
