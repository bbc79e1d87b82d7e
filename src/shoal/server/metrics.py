"""Prometheus metrics. Nothing in here can fail a request: a fault is logged, once a method."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import ParamSpec

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.engine.outputs import RequestMetrics
from shoal.scheduler.interface import SchedulerStats

logger = logging.getLogger(__name__)
P = ParamSpec("P")

# Seconds. The fine end covers decode steps, the coarse end queues on a slow machine.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)


def _never_fails(method: Callable[P, None]) -> Callable[P, None]:
    reported = False

    @functools.wraps(method)
    def safe(*args: P.args, **kwargs: P.kwargs) -> None:
        nonlocal reported
        try:
            method(*args, **kwargs)
        except Exception:
            if not reported:
                reported = True
                logger.exception("the metric '%s' could not be recorded", method.__name__)

    return safe


class Metrics:
    """The metrics of one server.

    `stats` is asked for the scheduler's newest snapshot at each scrape; None while there is none.
    """

    def __init__(self, stats: Callable[[], SchedulerStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_SchedulerCollector(stats))
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "shoal:request_success",
            "Ended choices by the reason: stop, length, abort or error.",
            ["finished_reason"],
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(reason)
        self._ttft = self._histogram("time_to_first_token", "Arrival to the first token.")
        self._itl = self._histogram("inter_token_latency", "Gap between a choice's tokens.")
        self._tpot = self._histogram(
            "time_per_output_token", "Mean gap between the tokens of an ended choice."
        )
        self._e2e = self._histogram("e2e_request_latency", "Arrival to the end of a choice.")
        self._queue = self._histogram("request_queue_time", "Arrival to the first step.")

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(f"shoal:{name}", documentation, registry=self._registry)

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(
            f"shoal:{name}_seconds",
            documentation,
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )

    @_never_fails
    def first_token(self, seconds: float) -> None:
        """A choice got its first token `seconds` after the request arrived."""
        self._ttft.observe(seconds)

    @_never_fails
    def token_gap(self, seconds: float) -> None:
        """A choice got its next token `seconds` after the one before."""
        self._itl.observe(seconds)

    @_never_fails
    def finished(self, reason: str, seconds: float, seconds_per_token: float | None) -> None:
        """A choice ended `seconds` after the request arrived."""
        self._success.labels(reason).inc()
        self._e2e.observe(seconds)
        if seconds_per_token is not None:
            self._tpot.observe(seconds_per_token)

    @_never_fails
    def queued(self, metrics: RequestMetrics) -> None:
        """A choice ended that had waited in the engine's queue."""
        if metrics.queue_time is not None:
            self._queue.observe(metrics.queue_time)

    @_never_fails
    def tokens(self, prompt_tokens: int, generation_tokens: int) -> None:
        """A request ended that had these many tokens."""
        self._prompt_tokens.inc(prompt_tokens)
        self._generation_tokens.inc(generation_tokens)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _SchedulerCollector(Collector):
    """Turns the scheduler's snapshot into samples when it is scraped."""

    def __init__(self, stats: Callable[[], SchedulerStats | None]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        """The samples of one scrape."""
        if (stats := self._stats()) is None:
            return
        for name, documentation, value in (
            ("num_requests_running", "Sequences that run.", stats.num_requests_running),
            ("num_requests_waiting", "Sequences in the queue.", stats.num_requests_waiting),
            (
                "kv_cache_usage_ratio",
                "Share of the KV blocks in use, 0 to 1.",
                stats.num_blocks_used / max(1, stats.num_blocks_total),
            ),
        ):
            yield GaugeMetricFamily(f"shoal:{name}", documentation, value=value)
        for name, documentation, value in (
            ("num_preemptions", "Preemptions.", stats.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found.", stats.prefix_cache_hits),
        ):
            yield CounterMetricFamily(f"shoal:{name}", documentation, value=value)
