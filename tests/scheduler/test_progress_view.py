"""What a view of the batch tells of each request."""

from __future__ import annotations

import pytest
from driving import Driver

SHARED = ("salt", "")


def test_a_running_request_is_seen_in_its_prompt_and_then_with_its_tokens() -> None:
    driver = Driver(settings={"max_num_seqs": 1, "max_num_batched_tokens": 16})
    driver.arrive("a", 40, max_tokens=3)
    driver.step()
    (a,) = driver.scheduler.view_batch(9).running
    assert (a.request_id, a.num_prompt_tokens, a.num_computed_tokens) == ("a", 40, 16)
    assert (a.num_output_tokens, a.is_done, a.arrival_time) == (0, False, 0.0)

    driver.step()
    driver.step()
    driver.step()

    (a,) = driver.scheduler.view_batch(9).running
    assert (a.num_computed_tokens, a.num_output_tokens) == (41, 2)
    driver.run()
    assert driver.scheduler.view_batch(9).running == []


def test_the_queue_is_seen_in_its_order_and_no_further_than_asked() -> None:
    driver = Driver(settings={"max_num_seqs": 1})
    driver.arrive("a", 5)
    driver.step()
    for name, priority in (("b", 0), ("c", -5), ("d", 0)):
        driver.arrive(name, 5, priority=priority)

    view = driver.scheduler.view_batch(2)

    assert [request.request_id for request in view.running] == ["a"]
    assert [(r.request_id, r.priority) for r in view.waiting] == [("c", -5), ("b", 0)]
    assert driver.scheduler.view_batch(0).waiting == []


@pytest.mark.parametrize("scheduler", ["static", "dynamic"])
def test_a_row_that_only_keeps_its_place_is_seen_as_done(scheduler: str) -> None:
    driver = Driver(settings={"scheduler": scheduler, "max_num_seqs": 2})
    driver.arrive("short", 5, max_tokens=1)
    driver.arrive("long", 5, max_tokens=9)
    driver.step()
    driver.step()
    done = {r.request_id: r.is_done for r in driver.scheduler.view_batch(0).running}
    assert done == {"short": True, "long": False}


def test_a_preempted_request_is_seen_in_the_queue() -> None:
    driver = Driver(num_blocks=14, settings={"max_num_seqs": 2})
    driver.arrive("a", 40, max_tokens=200)
    driver.arrive("b", 40, max_tokens=200)
    driver.step_until(lambda step: bool(step.preempted_request_ids))
    view = driver.scheduler.view_batch(9)
    assert [r.request_id for r in view.running] == ["a"]
    assert [(r.request_id, r.num_preemptions, r.num_computed_tokens) for r in view.waiting] == [
        ("b", 1, 0)
    ]


def test_each_prompt_token_that_is_computed_counts_once() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 64})
    driver.arrive("a", 100, max_tokens=20, cache_scope=SHARED)
    driver.arrive("bb", 33, max_tokens=1)
    driver.run()
    assert driver.scheduler.stats().num_prefill_tokens == 133
    driver.arrive(
        "c", 100, max_tokens=5, cache_scope=SHARED
    )  # begins like the first: six blocks are known
    driver.run()
    assert driver.scheduler.stats().num_prefill_tokens == 133 + 100 - 96
