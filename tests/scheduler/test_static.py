"""When static batching starts a batch."""

from __future__ import annotations

import math

from driving import Driver, shares

from shoal.config import EngineConfig


def static(**settings: object) -> Driver:
    return Driver(settings={"scheduler": "static", "max_num_seqs": 3} | settings)


def test_a_batch_starts_when_it_is_full_and_not_before() -> None:
    driver = static()
    for name in "ab":
        driver.arrive(name, 5, max_tokens=1)
        step = driver.step()
        assert not step.requests
        assert step.wake_time == math.inf
    driver.arrive("c", 5, max_tokens=1)
    assert set(shares(driver.step())) == {"a", "b", "c"}


def test_the_rest_runs_when_the_input_has_ended() -> None:
    driver = static()
    for name in "abcd":
        driver.arrive(name, 5, max_tokens=1)
    assert set(shares(driver.step())) == {"a", "b", "c"}
    assert not driver.step().requests
    driver.scheduler.end_input()
    assert set(shares(driver.step())) == {"d"}


def test_an_arrival_takes_back_that_the_input_has_ended() -> None:
    driver = static()
    driver.arrive("a", 5, max_tokens=1)
    driver.scheduler.end_input()
    driver.step()
    driver.arrive("b", 5, max_tokens=1)
    assert not driver.step().requests


def test_a_batch_that_does_not_fill_starts_after_the_delay_if_one_is_set() -> None:
    driver = static(max_queue_delay=2.5)
    driver.arrive("a", 5, max_tokens=1)
    step = driver.step()
    assert (step.requests, step.wake_time) == ([], 2.5)
    driver.now = 2.4
    assert not driver.step(seconds=0.1).requests
    assert shares(driver.step()) == {"a": 5}


def test_a_server_does_not_wait_for_ever() -> None:
    assert EngineConfig(scheduler="static").queue_delay == math.inf
    assert EngineConfig(scheduler="static").for_serving().queue_delay == 1.0
    own = EngineConfig(scheduler="static", max_queue_delay=7.0)
    assert own.for_serving().queue_delay == 7.0


def test_a_batch_starts_when_the_pool_holds_no_more() -> None:
    driver = Driver(num_blocks=4, settings={"scheduler": "static", "max_num_seqs": 8})
    driver.arrive("a", 5, max_tokens=40)
    assert not driver.step().requests
    driver.arrive("b", 5, max_tokens=40)
    assert set(shares(driver.step())) == {"a"}
