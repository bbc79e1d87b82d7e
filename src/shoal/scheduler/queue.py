"""Requests in the order in which they are served: by priority, then by arrival, with ageing."""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections.abc import Iterator

from shoal.request import Request

PRIORITY_LEVEL_SECONDS = 30.0
"""What one level of priority is worth in waiting time, so that no priority starves."""


def service_order(request: Request) -> float:
    """The key that requests are served by, smallest first.

    A request at priority p that arrived at time t stands where one of priority 0 would stand that
    arrived p levels later. Waiting counts for every request alike, so two requests never change
    places and the key never changes: ageing costs nothing. One that waits on after its time limit
    stands where it would if it had arrived then.
    """
    start = request.arrival_time if request.late_since is None else request.late_since
    return start + request.priority * PRIORITY_LEVEL_SECONDS


class RequestQueue:
    """Requests sorted by `service_order`; equal ones stay in the order of their insertion."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The request that is served before all others."""
        return self._requests[0]

    @property
    def last(self) -> Request:
        """The request that is served after all others."""
        return self._requests[-1]

    def add(self, request: Request) -> None:
        """Insert a request behind its equals."""
        insort_right(self._requests, request, key=service_order)

    def add_again(self, request: Request) -> None:
        """Insert a request that was here before, ahead of its equals."""
        insort_left(self._requests, request, key=service_order)

    def remove(self, request: Request) -> None:
        """Take a request out; it must be in the queue."""
        self._requests.remove(request)
