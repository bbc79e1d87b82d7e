"""Time limits of requests, and how long a refused client should stay away."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from shoal.request import Request, RequestStatus

DeadlineKind = Literal["max_queue_time", "max_total_time"]

DEFAULT_RETRY_AFTER = 1.0
MAX_RETRY_AFTER = 120.0
"""Seconds; a client that is told to stay away for longer is better told nothing."""

_MIN_SWEEP_LENGTH = 64


@dataclass(slots=True)
class Deadlines:
    """The limits of all requests in the order in which they are reached."""

    _heap: list[tuple[float, int, DeadlineKind, Request]] = field(default_factory=list)
    _ticks: itertools.count[int] = field(default_factory=itertools.count)
    _sweep_length: int = _MIN_SWEEP_LENGTH

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch the limits of a request that arrives, if it has any."""
        self._sweep()
        kinds: tuple[DeadlineKind, ...] = ("max_queue_time", "max_total_time")
        for kind in kinds:
            limit: float | None = getattr(request, kind)
            if limit is not None and math.isfinite(limit):
                deadline = request.arrival_time + limit
                heapq.heappush(self._heap, (deadline, next(self._ticks), kind, request))

    def reached(self, now: float) -> list[tuple[DeadlineKind, Request]]:
        """Take the limits that requests have reached, the first first.

        Those of ended requests are dropped, and so is the queue limit of one that was started.
        """
        if not self._heap or self._heap[0][0] > now:
            return []
        reached = []
        while (following := self.next()) is not None and following <= now:
            _, _, kind, request = heapq.heappop(self._heap)
            reached.append((kind, request))
        return reached

    def next(self) -> float | None:
        """When the next limit is reached, if there is one."""
        while self._heap:
            deadline, _, kind, request = self._heap[0]
            if _matters(kind, request):
                return deadline
            heapq.heappop(self._heap)
        return None

    def _sweep(self) -> None:
        """Let go of the requests whose limits don't matter any more, when they are half of all."""
        if len(self._heap) < self._sweep_length:
            return
        self._heap = [entry for entry in self._heap if _matters(entry[2], entry[3])]
        heapq.heapify(self._heap)
        self._sweep_length = max(2 * len(self._heap), _MIN_SWEEP_LENGTH)


def _matters(kind: DeadlineKind, request: Request) -> bool:
    has_started = request.first_scheduled_time is not None
    is_over = request.status is RequestStatus.FINISHED
    return not is_over and not (kind == "max_queue_time" and has_started)


@dataclass(slots=True)
class DepartureRate:
    """How fast requests leave, from the ends of the newest ones."""

    _times: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def note(self, now: float) -> None:
        """A request has ended."""
        self._times.append(now)

    def time_for(self, num_requests: int) -> float:
        """Seconds in which as many requests leave at the present rate, within bounds."""
        if len(self._times) < 2 or self._times[-1] <= self._times[0]:
            return DEFAULT_RETRY_AFTER
        seconds_each = (self._times[-1] - self._times[0]) / (len(self._times) - 1)
        return min(max(num_requests * seconds_each, DEFAULT_RETRY_AFTER), MAX_RETRY_AFTER)
