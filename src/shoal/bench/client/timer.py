"""Waits until a time as exactly as the system can; the timers of event loops tick in milliseconds.

A request that is sent late counts from when it was due, so each millisecond of a tick would be part
of the latencies that are measured.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Self

Clock = Callable[[], float]

MAX_BUSY_SECONDS = 2e-4
"""How long before its time a wait wakes, to be there when it comes: the system takes a tenth of a
millisecond to run a process again. For longer it would lose its turn just when the time comes."""

MAX_BUSY_SHARE = 0.05
"""Of the time between the waits that may go into that."""

_CLOCK_MONOTONIC = 1
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK and TFD_CLOEXEC are the same bits

_libc = ctypes.CDLL(None, use_errno=True)


class _TimerSpec(ctypes.Structure):
    """`struct itimerspec`: the interval, which stays 0, and the time to the first expiry."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Timer:
    """Wakes any number of waits by one timer of the system; used as a context, in an event loop.

    Args:
        clock: seconds on a monotonic clock.

    Raises:
        OSError: on entry, the system has no timer to give.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._waits: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap by time
        self._numbers = count()
        self._newest = clock()  # the latest time that has been waited for
        self._fd = -1

    def __enter__(self) -> Self:
        """Take a timer of the system."""
        self._fd = _checked(_libc.timerfd_create(_CLOCK_MONOTONIC, _FLAGS))
        asyncio.get_running_loop().add_reader(self._fd, self._on_expiry)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give it back."""
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)

    async def wait_until(self, when: float) -> None:
        """Return when the clock says `when`, never sooner, and at once if it is past that."""
        wake = when - busy_seconds(when - self._newest)
        self._newest = max(self._newest, when)
        if wake > self._clock():
            woken = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waits, (wake, next(self._numbers), woken))
            if self._waits[0][2] is woken:
                self._set()
            await woken
        while self._clock() < when:
            await asyncio.sleep(0)

    def _set(self) -> None:
        """Set the timer to the first wait; a time of 0 would switch it off."""
        remaining = self._waits[0][0] - self._clock()
        seconds, nanoseconds = divmod(max(1, int(remaining * 1e9)), 10**9)
        spec = _TimerSpec(0, 0, seconds, nanoseconds)
        _checked(_libc.timerfd_settime(self._fd, 0, ctypes.byref(spec), None))

    def _on_expiry(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set anew meanwhile
        now = self._clock()
        while self._waits and self._waits[0][0] <= now:
            woken = heapq.heappop(self._waits)[2]
            if not woken.done():  # else the wait was cancelled
                woken.set_result(None)
        if self._waits:
            self._set()


def busy_seconds(gap: float) -> float:
    """How long before its time a wait wakes that ends `gap` seconds after the one before it."""
    return max(0.0, min(MAX_BUSY_SECONDS, MAX_BUSY_SHARE * gap))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
