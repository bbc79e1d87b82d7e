"""Who goes first: priorities, their ageing, and taking another's seat."""

from __future__ import annotations

from typing import Any

import pytest
from driving import Driver, make_request, shares

from shoal.request import RequestStatus
from shoal.scheduler.continuous import MAX_BYPASSES
from shoal.scheduler.queue import PRIORITY_LEVEL_SECONDS

PREEMPTING = {"enable_priority_preemption": True}


def order_of(driver: Driver) -> list[str]:
    return sorted(driver.finish_times, key=lambda name: driver.finish_times[name])


def test_smaller_is_sooner_and_ties_go_by_arrival() -> None:
    driver = Driver(settings={"max_num_seqs": 1})
    for name, priority in [("a", 1), ("b", 0), ("c", 0), ("d", -1)]:
        driver.arrive(name, 5, max_tokens=1, priority=priority)
        driver.now += 0.001
    driver.run()
    assert order_of(driver) == ["d", "b", "c", "a"]


@pytest.mark.parametrize("budget", [2, 3, 512])
def test_with_preemption_an_urgent_request_starts_at_once_whatever_the_budget(budget: int) -> None:
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": budget, **PREEMPTING}
    driver = Driver(settings=settings)
    for name in ("low 1", "low 2"):
        driver.arrive(name, 1, max_tokens=50, priority=1)
    driver.step()
    driver.arrive("high", 1, max_tokens=5)
    assert "high" in shares(driver.step())


def test_without_preemption_an_urgent_request_waits_for_a_seat() -> None:
    driver = Driver(settings={"max_num_seqs": 2})
    for name in ("low 1", "low 2"):
        driver.arrive(name, 5, max_tokens=50, priority=1)
    driver.step()
    driver.arrive("high", 5, max_tokens=5)
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
    assert driver.requests["high"].first_scheduled_time == 50.0


def test_with_preemption_an_urgent_request_starts_in_the_next_step_and_the_victim_resumes() -> None:
    driver = Driver(settings={"max_num_seqs": 2, **PREEMPTING})
    for name in ("low 1", "low 2"):
        driver.arrive(name, 5, max_tokens=500, priority=1)
    for _ in range(10):
        driver.step()
    driver.arrive("high", 5, max_tokens=5)
    step = driver.step()
    assert shares(step) == {"low 1": 1, "high": 5}
    assert step.preempted_request_ids == ["low 2"]
    driver.run()
    assert driver.requests["low 2"].num_preemptions == 1
    alone = Driver()
    alone.arrive("low 2", 5, max_tokens=500)
    alone.run()
    assert driver.tokens_of("low 2") == alone.tokens_of("low 2")


def test_an_urgent_request_takes_blocks_where_seats_are_free() -> None:
    driver = Driver(num_blocks=6, settings=PREEMPTING)
    driver.arrive("low", 60, max_tokens=20, priority=1)
    driver.step()
    driver.arrive("high", 60, max_tokens=5)
    step = driver.step()
    assert (shares(step), step.preempted_request_ids) == ({"high": 60}, ["low"])
    driver.run()


def test_several_victims_are_taken_one_a_step() -> None:
    driver = Driver(num_blocks=8, settings=PREEMPTING)
    for name in ("low 1", "low 2"):
        driver.arrive(name, 60, max_tokens=4, priority=1)
    driver.step()
    driver.arrive("high", 100, max_tokens=1)
    first, second = driver.step(), driver.step()
    assert first.preempted_request_ids == ["low 2"]
    assert "high" not in shares(first)
    assert second.preempted_request_ids == ["low 1"]
    assert shares(second) == {"high": 100}
    driver.run()


def test_nobody_is_preempted_for_a_request_that_would_not_fit_even_so() -> None:
    driver = Driver(num_blocks=16, settings=PREEMPTING)
    driver.arrive("high", 150, max_tokens=10, priority=-1)  # 10 blocks
    driver.arrive("low", 30, max_tokens=2, priority=1)  # 2 blocks
    driver.step()
    driver.arrive("middle", 110, max_tokens=1)  # 7 blocks, but only 6 are not the urgent one's
    assert driver.step().preempted_request_ids == []
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


def test_equal_priorities_never_take_each_others_seats() -> None:
    driver = Driver(settings={"max_num_seqs": 1, **PREEMPTING})
    driver.arrive("a", 5, max_tokens=10)
    driver.step()
    driver.arrive("b", 5, max_tokens=1)
    driver.run()
    assert order_of(driver) == ["a", "b"]
    assert driver.scheduler.stats().num_preemptions == 0


def test_a_request_that_was_passed_takes_nothing_back_from_its_equals() -> None:
    driver = Driver(num_blocks=8, settings=PREEMPTING)
    driver.arrive("holder", 60, max_tokens=4)
    driver.step()
    driver.arrive("large", 100, max_tokens=1)
    driver.now += 0.5
    driver.arrive("small", 10, max_tokens=20)
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
    assert order_of(driver) == ["holder", "small", "large"]


def test_a_request_that_has_aged_keeps_its_seat() -> None:
    driver = Driver(settings={"max_num_seqs": 1, **PREEMPTING})
    driver.arrive("low", 5, max_tokens=100, priority=1)
    driver.step()
    driver.now = PRIORITY_LEVEL_SECONDS + 1.0
    driver.arrive("high", 5, max_tokens=1)
    assert driver.step().preempted_request_ids == []
    driver.run()
    assert order_of(driver) == ["low", "high"]


def test_a_displacing_request_counts_as_passing_those_that_came_before_it() -> None:
    driver = Driver(num_blocks=16, settings=PREEMPTING)
    driver.arrive("first", 150, max_tokens=10, priority=-1)
    driver.arrive("low", 90, max_tokens=2, priority=3)
    driver.step()
    driver.arrive("large", 110, max_tokens=1, priority=-1)
    driver.arrive("small", 80, max_tokens=1)
    step = driver.step()
    assert step.preempted_request_ids == ["low"]
    assert "small" in shares(step)
    assert driver.requests["large"].num_bypasses == 1
    driver.run()


@pytest.mark.parametrize("settings", [{}, PREEMPTING], ids=["", "with preemption"])
def test_a_low_request_finishes_within_its_bound_under_a_permanent_stream_of_higher_ones(
    settings: dict[str, Any],
) -> None:
    """The stream takes every seat that becomes free, until the low one has aged."""
    driver = Driver(settings={"max_num_seqs": 2, **settings})
    level, service = 2, 4.0
    driver.add(make_request("low", 5, max_tokens=4, priority=level))
    for index in range(1000):
        while driver.scheduler.stats().num_requests_waiting < 4:
            driver.arrive(f"high {index} {len(driver.requests)}", 5, max_tokens=4)
        driver.step()
        if "low" in driver.finished:
            break
    started = driver.requests["low"].first_scheduled_time
    assert started is not None
    bound = level * PRIORITY_LEVEL_SECONDS
    assert bound <= started <= bound + service
    assert driver.finish_times["low"] <= bound + 2 * service


@pytest.mark.parametrize("settings", [{}, PREEMPTING], ids=["", "with preemption"])
def test_nobody_who_comes_later_than_a_level_is_worth_goes_before(settings: dict[str, Any]) -> None:
    """The stream brings twice what one seat can serve, so its backlog grows."""
    driver = Driver(settings={"max_num_seqs": 1, **settings})
    driver.arrive("low", 5, max_tokens=3, priority=1)
    while "low" not in driver.finished:
        driver.arrive(f"high {driver.now:.1f}", 5, max_tokens=2)
        driver.step()
    for name in driver.finished:
        assert driver.requests[name].arrival_time <= PRIORITY_LEVEL_SECONDS


@pytest.mark.parametrize("strategy", ["static", "dynamic", "continuous"])
def test_a_cold_prompt_is_not_starved_by_hot_ones(strategy: str) -> None:
    """Prompts whose prefix is cached keep coming at capacity; they don't go first for it."""
    settings: dict[str, Any] = {"scheduler": strategy, "max_num_seqs": 2}
    driver = Driver(
        settings=settings | ({} if strategy == "continuous" else {"max_queue_delay": 0.0})
    )
    scope = ("salt", "")
    hot = list(range(64))
    for index in range(4):
        driver.arrive(f"first {index}", 0, max_tokens=4, prompt=hot, cache_scope=scope)
    driver.arrive("cold", 0, max_tokens=4, prompt=[999] * 64, cache_scope=scope)
    for index in range(100):
        driver.arrive(f"hot {index}", 0, max_tokens=4, prompt=hot, cache_scope=scope)
        driver.step()
    assert driver.finish_times["cold"] <= 20
    assert driver.scheduler.stats().prefix_cache_hits > 0


def test_in_one_step_a_large_request_is_passed_no_more_often_than_the_bound() -> None:
    driver = Driver(num_blocks=40, settings={"max_num_seqs": 64})
    driver.arrive("holder", 300, max_tokens=200)
    driver.step()
    driver.arrive("large", 600, max_tokens=1)
    for index in range(2 * MAX_BYPASSES):
        driver.arrive(f"small {index:02}", 3, max_tokens=1)
    assert len(driver.step().requests) == 1 + MAX_BYPASSES
    assert driver.requests["large"].num_bypasses == MAX_BYPASSES
    assert driver.requests["large"].status is RequestStatus.WAITING
