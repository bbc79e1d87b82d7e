"""When dynamic batching starts a batch, and with whom."""

from __future__ import annotations

import math
from typing import Any

import pytest
from driving import Driver, shares

from shoal.config import ConfigError, EngineConfig


def dynamic(**settings: Any) -> Driver:
    defaults = {"scheduler": "dynamic", "max_num_seqs": 4, "max_queue_delay": 0.1}
    return Driver(settings=defaults | settings)


def arrive(driver: Driver, *names: str, num_prompt_tokens: int = 5) -> None:
    for name in names:
        driver.arrive(name, num_prompt_tokens, max_tokens=1)


def test_a_full_batch_starts_at_once() -> None:
    driver = dynamic(max_queue_delay=math.inf)
    arrive(driver, *"abc")
    assert not driver.step().requests
    arrive(driver, *"de")
    assert set(shares(driver.step())) == {"a", "b", "c", "d"}


def test_the_delay_counts_from_the_oldest_and_later_arrivals_do_not_extend_it() -> None:
    driver = dynamic()
    arrive(driver, "a")
    assert driver.step(seconds=0.09).wake_time == 0.1
    arrive(driver, "b")
    assert driver.step(seconds=0.0).wake_time == 0.1
    driver.now = 0.1
    assert set(shares(driver.step())) == {"a", "b"}


def test_without_delay_nobody_waits() -> None:
    driver = dynamic(max_queue_delay=0.0)
    arrive(driver, "a")
    assert shares(driver.step()) == {"a": 5}


def test_a_huge_delay_waits_for_a_full_batch_or_the_end_of_the_input() -> None:
    driver = dynamic(max_queue_delay=1e6)
    arrive(driver, "a")
    driver.now = 1e5
    assert not driver.step().requests
    driver.scheduler.end_input()
    assert shares(driver.step()) == {"a": 5}


def test_a_batch_keeps_to_the_budget_of_prompt_tokens() -> None:
    driver = dynamic(max_num_batched_tokens=20, max_queue_delay=math.inf)
    arrive(driver, *"ab", num_prompt_tokens=8)
    assert not driver.step().requests
    arrive(driver, "c", num_prompt_tokens=8)
    assert shares(driver.step()) == {"a": 8, "b": 8}


def test_a_batch_that_reaches_the_budget_exactly_starts() -> None:
    driver = dynamic(max_num_batched_tokens=20, max_queue_delay=math.inf)
    arrive(driver, *"ab", num_prompt_tokens=10)
    assert shares(driver.step()) == {"a": 10, "b": 10}


def test_a_prompt_above_the_budget_runs_alone_in_pieces() -> None:
    driver = dynamic(max_num_batched_tokens=20)
    arrive(driver, "long", num_prompt_tokens=50)
    arrive(driver, "b")
    assert [shares(driver.step()) for _ in range(3)] == [{"long": 20}, {"long": 20}, {"long": 10}]
    assert "long" in driver.finished


def test_a_preferred_size_starts_before_the_batch_is_full() -> None:
    driver = dynamic(max_num_seqs=8, preferred_batch_sizes=(2, 4), max_queue_delay=1.0)
    arrive(driver, "a")
    assert not driver.step(seconds=0.0).requests
    arrive(driver, "b")
    assert set(shares(driver.step(seconds=0.0))) == {"a", "b"}


def test_the_largest_preferred_size_that_there_are_requests_for_is_taken() -> None:
    driver = dynamic(max_num_seqs=8, preferred_batch_sizes=(2, 4), max_queue_delay=1.0)
    arrive(driver, *"abcde")
    assert set(shares(driver.step(seconds=0.0))) == {"a", "b", "c", "d"}
    step = driver.step(seconds=0.0)
    assert (step.requests, step.wake_time) == ([], 1.0)


def test_after_the_delay_a_batch_of_any_size_starts() -> None:
    driver = dynamic(max_num_seqs=8, preferred_batch_sizes=(2,), max_queue_delay=1.0)
    arrive(driver, *"abc")
    driver.now = 1.0
    assert set(shares(driver.step())) == {"a", "b", "c"}


def test_a_preferred_size_that_is_never_reached_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"preferred_batch_sizes has 9, .* max_num_seqs \(8\)"):
        EngineConfig(scheduler="dynamic", max_num_seqs=8, preferred_batch_sizes=(4, 9))
