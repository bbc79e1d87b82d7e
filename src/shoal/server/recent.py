"""What the last minutes brought, kept for the dashboard in a bounded space."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from shoal.scheduler.interface import SchedulerStats
from shoal.server.never_fails import never_fails

WINDOW = 300.0
"""Seconds that are remembered."""

INTERVAL = 2.0
"""Seconds that one point of the history stands for: longer than most steps."""

RATE_INTERVALS = 3
"""Intervals that a present rate is measured over; the newest is still running."""

UTILIZATION_INTERVALS = 30
"""Intervals that the slot utilisation is about: a minute, as the gauge of the metrics."""

MAX_SAMPLES = 4096
"""Latencies remembered of a kind; with more in the window the oldest are forgotten."""

_NUM_INTERVALS = round(WINDOW / INTERVAL)
_NOTHING = SchedulerStats(0, 0, 0, 0, 0)


class Throughput(msgspec.Struct, frozen=True):
    """Tokens per second: now, and over the past in steps of `interval` seconds, oldest first."""

    prompt: float
    output: float
    prompt_history: list[float]
    output_history: list[float]
    interval: float = INTERVAL


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of a latency in seconds, and of how many it is."""

    p50: float
    p90: float
    p99: float
    count: int


class _Interval(msgspec.Struct):
    """What the steps of one interval brought."""

    index: int  # intervals since the clock's zero
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_slots: int = 0


class RecentSteps:
    """Follows the scheduler's snapshots; costs about a microsecond a step."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._intervals: deque[_Interval] = deque(maxlen=_NUM_INTERVALS)
        self.stats = _NOTHING  # the newest

    @never_fails
    def observe(self, stats: SchedulerStats) -> None:
        """Take in a snapshot; there is one after every step."""
        last, self.stats = self.stats, stats
        index = int(self._clock() / INTERVAL)
        if not self._intervals or self._intervals[-1].index != index:
            self._intervals.append(_Interval(index))
        interval = self._intervals[-1]
        interval.num_prompt_tokens += stats.num_prefill_tokens - last.num_prefill_tokens
        interval.num_output_tokens += stats.num_useful_slots - last.num_useful_slots
        interval.num_slots += stats.num_slots - last.num_slots

    def throughput(self) -> Throughput:
        """How fast tokens are computed; those found in the prefix cache are not."""
        now = self._clock() / INTERVAL
        seconds = (RATE_INTERVALS - 1 + now % 1) * INTERVAL
        recent = self._last(RATE_INTERVALS)
        past = self._last(_NUM_INTERVALS)[:-1]
        return Throughput(
            prompt=sum(i.num_prompt_tokens for i in recent) / seconds,
            output=sum(i.num_output_tokens for i in recent) / seconds,
            prompt_history=[i.num_prompt_tokens / INTERVAL for i in past],
            output_history=[i.num_output_tokens / INTERVAL for i in past],
        )

    def slot_utilization(self) -> float | None:
        """Share of the last minute's slots that produced a wanted token; None without any."""
        recent = self._last(UTILIZATION_INTERVALS)
        num_slots = sum(i.num_slots for i in recent)
        return sum(i.num_output_tokens for i in recent) / num_slots if num_slots else None

    def _last(self, count: int) -> list[_Interval]:
        """The last intervals, oldest first, the running one included and empty ones filled in."""
        now = int(self._clock() / INTERVAL)
        known = {interval.index: interval for interval in self._intervals}
        return [known.get(index) or _Interval(index) for index in range(now - count + 1, now + 1)]


class RecentLatencies:
    """A latency's samples of the last minutes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)  # when, seconds

    def observe(self, seconds: float) -> None:
        """Take in a sample."""
        self._samples.append((self._clock(), seconds))

    def percentiles(self) -> Percentiles | None:
        """Of the window's samples; None without any."""
        start = self._clock() - WINDOW
        values = sorted(seconds for when, seconds in self._samples if when >= start)
        if not values:
            return None
        p50, p90, p99 = (_percentile(values, share) for share in (0.5, 0.9, 0.99))
        return Percentiles(p50, p90, p99, len(values))


def _percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the ranks of sorted values."""
    rank = share * (len(values) - 1)
    low, high = values[math.floor(rank)], values[math.ceil(rank)]
    return low + (high - low) * (rank % 1)
