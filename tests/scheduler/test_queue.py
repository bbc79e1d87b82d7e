from __future__ import annotations

from driving import make_request

from shoal.scheduler.queue import PRIORITY_LEVEL_SECONDS, RequestQueue


def names(queue: RequestQueue) -> list[str]:
    return [request.request_id for request in queue]


def test_smaller_priority_comes_first_and_ties_go_by_arrival() -> None:
    queue = RequestQueue()
    for name, priority, arrival in [
        ("late", 0, 2),
        ("low", 1, 0),
        ("high", -1, 3),
        ("early", 0, 1),
    ]:
        queue.add(make_request(name, 1, priority=priority, arrival_time=arrival))
    assert names(queue) == ["high", "early", "late", "low"]
    assert queue.last.request_id == "low"


def test_equals_stay_in_the_order_of_insertion() -> None:
    queue = RequestQueue()
    for name in "abc":
        queue.add(make_request(name, 1))
    assert names(queue) == ["a", "b", "c"]


def test_one_that_comes_back_goes_ahead_of_its_equals() -> None:
    queue = RequestQueue()
    first, second = make_request("first", 1), make_request("second", 1)
    queue.add(second)
    queue.add_again(first)
    assert names(queue) == ["first", "second"]


def test_waiting_makes_up_for_a_lower_priority() -> None:
    queue = RequestQueue()
    queue.add(make_request("low", 1, priority=1, arrival_time=0.0))
    queue.add(make_request("soon", 1, priority=0, arrival_time=PRIORITY_LEVEL_SECONDS - 1))
    queue.add(make_request("later", 1, priority=0, arrival_time=PRIORITY_LEVEL_SECONDS + 1))
    assert names(queue) == ["soon", "low", "later"]
