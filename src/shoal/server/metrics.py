"""Prometheus metrics of requests. Nothing in here can fail one: a fault is logged, once a kind."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from shoal.engine.outputs import RequestMetrics
from shoal.request import FinishReason
from shoal.server.never_fails import never_fails
from shoal.server.recent import RecentLatencies, RecentSteps
from shoal.server.record import Refusal
from shoal.server.step_metrics import StepMetrics

# Seconds. The fine end covers decode steps, the coarse end queues on a slow machine.
LATENCY_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


class Metrics:
    """The metrics of one server.

    `steps` has those of its scheduler; `recent_*` know the last minutes, for the dashboard.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.steps = StepMetrics()
        self._registry.register(self.steps)
        self.recent_steps = RecentSteps()
        self.recent_ttft = RecentLatencies()
        self.recent_tpot = RecentLatencies()
        self._prompt_tokens = self._counter(
            "prompt_tokens",
            "Tokens of prompts, cached ones included, that led to a first token.",
        )
        self._generation_tokens = _PlainCounter("shoal:generation_tokens", "Tokens generated.")
        self._registry.register(self._generation_tokens)
        self._success = self._counter(
            "request_success", "Choices that ended, by the reason.", "finished_reason"
        )
        for reason in FinishReason:
            self._success.labels(str(reason))
        self._refused = self._counter(
            "requests_refused", "Requests turned away without an answer, by the reason.", "reason"
        )
        for refusal in get_args(Refusal):
            self._refused.labels(refusal)
        self._ttft = self._histogram("time_to_first_token", "First byte in to first token out.")
        self._itl = _PlainHistogram(
            "shoal:inter_token_latency_seconds", "Gap between a choice's tokens."
        )
        self._registry.register(self._itl)
        self._tpot = self._histogram(
            "time_per_output_token", "Mean gap between the tokens of a complete choice."
        )
        self._e2e = self._histogram(
            "e2e_request_latency", "Arrival to the end of a complete choice."
        )
        self._queue = self._histogram("request_queue_time", "Arrival to the first step.")
        self._prefill = self._histogram(
            "request_prefill_time", "The first step to the first token."
        )
        self._decode = self._histogram("request_decode_time", "The first token to the end.")

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"shoal:{name}", documentation, labels, registry=self._registry)

    def _histogram(self, name: str, documentation: str) -> Histogram:
        return Histogram(
            f"shoal:{name}_seconds",
            documentation,
            buckets=LATENCY_BUCKETS,
            registry=self._registry,
        )

    @never_fails
    def prompt_answered(self, num_tokens: int) -> None:
        """The first token after a prompt came: all of it was computed, or found in the cache."""
        self._prompt_tokens.inc(num_tokens)

    @never_fails
    def first_tokens(self, seconds: float, num_tokens: int) -> None:
        """A choice got its first tokens `seconds` after the request arrived."""
        self._ttft.observe(seconds)
        self.recent_ttft.observe(seconds)
        self._generation_tokens.value += num_tokens

    @never_fails
    def next_tokens(self, seconds: float, num_tokens: int) -> None:
        """A choice got its next tokens `seconds` after the ones before."""
        self._itl.observe(seconds)
        self._generation_tokens.value += num_tokens

    @never_fails
    def finished(
        self, reason: FinishReason, seconds: float, seconds_per_token: float | None
    ) -> None:
        """A choice ended `seconds` after the request arrived.

        Latencies of choices that were cut off say nothing about those that weren't: they aren't
        observed.
        """
        self._success.labels(str(reason)).inc()
        if reason not in COMPLETE:
            return
        self._e2e.observe(seconds)
        if seconds_per_token is not None:
            self._tpot.observe(seconds_per_token)
            self.recent_tpot.observe(seconds_per_token)

    @never_fails
    def ended_in_engine(self, metrics: RequestMetrics) -> None:
        """A choice ended in the engine, which knows what it spent its time on."""
        for histogram, seconds in (
            (self._queue, metrics.queue_time),
            (self._prefill, metrics.prefill_time),
            (self._decode, metrics.decode_time),
        ):
            if seconds is not None:
                histogram.observe(seconds)

    @never_fails
    def refused(self, reason: Refusal) -> None:
        """A request was turned away."""
        self._refused.labels(reason).inc()

    def finished_by_reason(self) -> dict[str, int]:
        """Choices that ended."""
        return _by_label(self._success, "finished_reason")

    def refused_by_reason(self) -> dict[str, int]:
        """Requests turned away."""
        return _by_label(self._refused, "reason")

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _by_label(counter: Counter, label: str) -> dict[str, int]:
    return {
        sample.labels[label]: int(sample.value)
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


class _PlainCounter(Collector):
    """A counter for what comes with every token: it costs an addition, without a lock."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self.value = 0

    def collect(self) -> Iterable[Metric]:
        """The one sample."""
        yield CounterMetricFamily(self._name, self._documentation, value=self.value)


class _PlainHistogram(Collector):
    """A histogram of latencies for what comes with every token: without locks."""

    def __init__(self, name: str, documentation: str) -> None:
        self._name = name
        self._documentation = documentation
        self._counts = [0] * (len(LATENCY_BUCKETS) + 1)  # the last one is above all bounds
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Take in a sample."""
        self._counts[bisect_left(LATENCY_BUCKETS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterable[Metric]:
        """The samples: of each bucket with those below it."""
        bounds = map(floatToGoString, (*LATENCY_BUCKETS, float("inf")))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(
            self._name, self._documentation, buckets=buckets, sum_value=self._sum
        )
