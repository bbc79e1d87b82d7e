"""Prometheus metrics of the scheduler: what the steps compute, and what is in them now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.scheduler.interface import SchedulerStats
from shoal.server.never_fails import never_fails

UTILIZATION_WINDOW = 60.0
"""Seconds of steps that the utilisation gauge is about."""

_SAMPLE_INTERVAL = 1.0
_STEP_TOKEN_BUCKETS = tuple(2**exponent for exponent in range(15))  # 1 to 16384


class _Snapshot(NamedTuple):
    time: float  # seconds of the clock
    stats: SchedulerStats


class StepMetrics(Collector):
    """Follows the scheduler's snapshots, and turns the newest into samples when it is scraped."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._newest: _Snapshot | None = None
        self._past: deque[_Snapshot] = deque()  # about one a second, the oldest first
        self._step_tokens = Histogram(
            "shoal:iteration_tokens",
            "Tokens computed in a step.",
            buckets=_STEP_TOKEN_BUCKETS,
            registry=None,
        )

    @never_fails
    def observe(self, stats: SchedulerStats) -> None:
        """Take in a snapshot; there is one after every step."""
        now = self._clock()
        last = self._newest or _Snapshot(now, stats)
        self._newest = _Snapshot(now, stats)
        if stats.num_steps > last.stats.num_steps:
            self._step_tokens.observe(stats.num_scheduled_tokens - last.stats.num_scheduled_tokens)
        if not self._past or now - self._past[-1].time >= _SAMPLE_INTERVAL:
            # Not the new one: a pause may lie between the two, and what it ends belongs behind it.
            self._past.append(last)
            self._forget_before(now - UTILIZATION_WINDOW)

    def collect(self) -> Iterable[Metric]:
        """The samples of one scrape; none before the model is loaded."""
        if self._newest is None:
            return
        stats = self._newest.stats
        yield from _gauges(stats)
        yield _blocks(stats)
        yield GaugeMetricFamily(
            "shoal:batch_slot_utilization_ratio",
            f"Share of the slots of the last {UTILIZATION_WINDOW:g} seconds' steps that produced "
            "a wanted token, 0 to 1; 0 when idle.",
            value=self._slot_utilization(stats),
        )
        yield from _counters(stats)
        yield from self._step_tokens.collect()

    def _slot_utilization(self, stats: SchedulerStats) -> float:
        if stats.num_requests_running == stats.num_requests_waiting == 0:
            return 0.0
        self._forget_before(self._clock() - UTILIZATION_WINDOW)
        start = self._past[0].stats
        num_slots = stats.num_slots - start.num_slots
        return (stats.num_useful_slots - start.num_useful_slots) / max(1, num_slots)

    def _forget_before(self, time_limit: float) -> None:
        """Drop old snapshots, but for the newest of them: the window begins with it."""
        while len(self._past) > 1 and self._past[1].time <= time_limit:
            self._past.popleft()


def _gauges(stats: SchedulerStats) -> Iterable[Metric]:
    for name, documentation, value in (
        ("num_requests_running", "Sequences that run.", stats.num_requests_running),
        ("num_requests_waiting", "Sequences in the queue.", stats.num_requests_waiting),
        (
            "kv_cache_usage_ratio",
            "Share of the KV blocks that requests hold, 0 to 1.",
            stats.num_blocks_used / max(1, stats.num_blocks_total),
        ),
    ):
        yield GaugeMetricFamily(f"shoal:{name}", documentation, value=value)


def _blocks(stats: SchedulerStats) -> Metric:
    blocks = GaugeMetricFamily(
        "shoal:num_blocks",
        "KV blocks: used by requests, cached for prompts to come, or empty.",
        labels=["state"],
    )
    num_empty = stats.num_blocks_total - stats.num_blocks_used - stats.num_blocks_cached
    blocks.add_metric(["used"], stats.num_blocks_used)
    blocks.add_metric(["cached"], stats.num_blocks_cached)
    blocks.add_metric(["empty"], num_empty)
    return blocks


def _counters(stats: SchedulerStats) -> Iterable[Metric]:
    for name, documentation, value in (
        ("num_preemptions", "Preemptions.", stats.num_preemptions),
        (
            "prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            stats.prefix_cache_queries,
        ),
        ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_cache_hits),
        (
            "batch_slots",
            "Slots of all steps: rows computed or reserved, and seats empty while requests wait.",
            stats.num_slots,
        ),
        (
            "batch_slots_useful",
            "Of these, rows that produced a wanted token.",
            stats.num_useful_slots,
        ),
    ):
        yield CounterMetricFamily(f"shoal:{name}", documentation, value=value)
