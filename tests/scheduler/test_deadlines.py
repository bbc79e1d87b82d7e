"""Time limits of requests, and what a refused client is told."""

from __future__ import annotations

from typing import Any

import pytest
from driving import Driver, make_request, shares

from shoal.request import FinishReason, RequestStatus
from shoal.scheduler.deadlines import DEFAULT_RETRY_AFTER, Deadlines, DepartureRate

STRATEGIES = pytest.mark.parametrize(
    "settings",
    [
        {"scheduler": "static", "max_queue_delay": 0.0},
        {"scheduler": "dynamic", "max_queue_delay": 0.0},
        {"scheduler": "continuous"},
    ],
    ids=lambda settings: settings["scheduler"],
)


def busy(settings: dict[str, Any], **more: Any) -> Driver:
    """A driver whose only seat is taken for 100 steps."""
    driver = Driver(settings={**settings, "max_num_seqs": 1, **more})
    driver.arrive("busy", 5, max_tokens=100)
    driver.step(seconds=0.0)
    return driver


@STRATEGIES
def test_a_queued_request_is_refused_at_its_limit_and_not_when_a_seat_is_free(
    settings: dict[str, Any],
) -> None:
    driver = busy(settings)
    driver.arrive("a", 5, max_queue_time=0.2)
    driver.arrive("b", 5, max_tokens=1)
    driver.step(seconds=0.19)
    driver.step(seconds=0.01)
    assert "a" not in driver.finished
    driver.step()
    output = driver.finished["a"]
    assert driver.finish_times["a"] == 0.2
    assert output.finish_reason is FinishReason.ERROR
    assert output.error == "no token came within its max_queue_time of 0.2 s"
    assert output.retry_after is not None
    driver.run()
    assert driver.reason_of("b") is FinishReason.LENGTH
    assert all("a" not in shares(step) for step in driver.executor.steps)


@STRATEGIES
def test_a_request_that_has_been_started_has_no_queue_limit_any_more(
    settings: dict[str, Any],
) -> None:
    driver = Driver(settings=settings)
    driver.arrive("a", 5, max_tokens=10, max_queue_time=2.0)
    driver.run()
    assert len(driver.tokens_of("a")) == 10


@STRATEGIES
def test_delayed_requests_wait_behind_all_that_are_not(settings: dict[str, Any]) -> None:
    driver = busy(settings, queue_timeout_action="delay")
    driver.arrive("a", 5, max_tokens=1, max_queue_time=10.0)
    driver.now = 5.0
    driver.arrive("b", 5, max_tokens=1)
    driver.now = 10.0
    driver.step()
    driver.arrive("c", 5, max_tokens=1)
    driver.run()
    order = sorted("abc", key=lambda name: driver.finish_times[name])
    assert order == ["b", "a", "c"]  # c came when a was late already
    assert driver.reason_of("a") is FinishReason.LENGTH


@STRATEGIES
def test_a_request_ends_at_its_total_limit_with_the_tokens_that_it_has(
    settings: dict[str, Any],
) -> None:
    driver = Driver(settings=settings)
    driver.arrive("a", 5, max_tokens=100, max_total_time=3.0)
    driver.run()
    output = driver.finished["a"]
    assert driver.finish_times["a"] == 3.0
    assert len(driver.tokens_of("a")) == 3
    assert (output.finish_reason, output.stop_reason) == (FinishReason.LENGTH, "max_total_time")
    assert output.error is None


@STRATEGIES
def test_a_request_without_a_token_at_its_total_limit_is_refused(settings: dict[str, Any]) -> None:
    driver = busy(settings)
    driver.arrive("a", 5, max_total_time=3.0)
    driver.now = 3.0
    driver.step()
    assert driver.finished["a"].error == "no token came within its max_total_time of 3 s"
    assert driver.finished["a"].retry_after is not None


def test_a_preempted_request_ends_at_its_total_limit_with_the_tokens_that_it_has() -> None:
    driver = Driver(settings={"max_num_seqs": 1, "enable_priority_preemption": True})
    driver.arrive("a", 5, max_tokens=50, max_total_time=4.0, priority=1)
    driver.step()
    driver.step()
    driver.arrive("urgent", 5, max_tokens=50)
    driver.step()
    assert driver.requests["a"].status is RequestStatus.PREEMPTED
    driver.step()
    driver.step()
    assert len(driver.tokens_of("a")) == 2
    assert driver.finished["a"].stop_reason == "max_total_time"
    driver.run()


@pytest.mark.parametrize("strategy", ["static", "dynamic"])
def test_a_row_that_is_done_keeps_its_reason_when_its_limit_comes_before_its_batch_ends(
    strategy: str,
) -> None:
    driver = Driver(settings={"scheduler": strategy, "max_num_seqs": 2, "max_queue_delay": 0.0})
    driver.arrive("a", 5, max_tokens=2, max_total_time=4.0)
    driver.arrive("b", 5, max_tokens=10)
    driver.run()
    assert driver.finish_times["a"] == 4.0
    assert (driver.reason_of("a"), driver.finished["a"].stop_reason) == (FinishReason.LENGTH, None)
    assert len(driver.tokens_of("a")) == 2
    assert len(driver.tokens_of("b")) == 10


def test_a_batch_that_waits_to_fill_wakes_for_a_limit() -> None:
    driver = Driver(settings={"scheduler": "static", "max_num_seqs": 2})
    driver.arrive("a", 5, max_queue_time=7.0)
    assert driver.step(seconds=0.0).wake_time == 7.0
    driver.now = 7.0
    step = driver.step()
    assert [output.request_id for output in step.ended] == ["a"]
    assert (step.wake_time, driver.scheduler.has_work()) == (None, False)


def test_limits_are_reached_in_their_order_and_once() -> None:
    deadlines = Deadlines()
    deadlines.add(make_request("late", 1, max_total_time=5.0, arrival_time=2.0))
    deadlines.add(make_request("both", 1, max_queue_time=1.0, max_total_time=6.0))
    assert deadlines.next() == 1.0
    assert [(kind, r.request_id) for kind, r in deadlines.reached(6.5)] == [
        ("max_queue_time", "both"),
        ("max_total_time", "both"),
    ]
    assert deadlines.reached(6.9) == []
    assert deadlines.next() == 7.0


def test_requests_that_have_ended_are_let_go_of_before_their_limits() -> None:
    deadlines = Deadlines()
    for index in range(1000):
        request = make_request(str(index), 1, max_queue_time=1e6, max_total_time=1e6)
        deadlines.add(request)
        request.status = RequestStatus.FINISHED
    assert len(deadlines) < 200


def test_refused_clients_stay_away_until_half_of_the_queue_is_gone() -> None:
    rate = DepartureRate()
    assert rate.time_for(10) == DEFAULT_RETRY_AFTER  # nothing is known yet
    for index in range(10):
        rate.note(100.0 + 0.5 * index)
    assert rate.time_for(8) == 4.0
    assert rate.time_for(0) == DEFAULT_RETRY_AFTER
    assert rate.time_for(10**6) == 120.0


def test_only_the_newest_departures_count() -> None:
    rate = DepartureRate()
    for index in range(64):
        rate.note(100.0 * index)
    for index in range(64):
        rate.note(10_000.0 + 2.0 * index)
    assert rate.time_for(10) == 20.0


def test_departures_at_one_moment_tell_no_rate() -> None:
    rate = DepartureRate()
    rate.note(5.0)
    rate.note(5.0)
    assert rate.time_for(10) == DEFAULT_RETRY_AFTER


def test_the_queue_refuses_with_the_time_that_half_of_it_takes() -> None:
    driver = Driver(settings={"max_num_seqs": 1, "max_waiting_requests": 8})
    for index in range(8):
        driver.arrive(f"done {index}", 5, max_tokens=3)
    driver.run()  # one leaves every 3 seconds
    for index in range(8):
        driver.arrive(f"waiting {index}", 5)
    with pytest.raises(Exception, match="8 requests wait already") as refusal:
        driver.arrive("refused", 5)
    assert refusal.value.retry_after == 12.0
