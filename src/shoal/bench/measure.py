"""The figures of a benchmark, defined once.

Times are seconds on one monotonic clock. docs/benchmarking.md states the same definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """When one completed request was sent, got its first token and its last one."""

    sent: float
    first_token: float
    last_token: float
    num_input_tokens: int
    num_output_tokens: int

    @property
    def ttft(self) -> float:
        """Time to first token: from the send time, waiting included, to the first token."""
        return self.first_token - self.sent

    @property
    def e2e(self) -> float:
        """End-to-end latency: from the send time to the last token."""
        return self.last_token - self.sent

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token, which has none."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles (linear interpolation between ranks) of a sample, in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Summarise `values`; None when there are none."""
        if not values:
            return None
        p50, p90, p99 = np.percentile(values, PERCENTILES).tolist()
        return cls(float(np.mean(values)), p50, p90, p99, max(values))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of one run over its completed requests; failures are counted apart."""

    num_completed: int
    num_failed: int
    duration: float  # from the first send to the last token
    num_input_tokens: int
    num_output_tokens: int
    ttft: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None

    @property
    def requests_per_second(self) -> float:
        """Completed requests / duration."""
        return self.num_completed / self.duration

    @property
    def input_tokens_per_second(self) -> float:
        """Prompt tokens of the completed requests / duration."""
        return self.num_input_tokens / self.duration

    @property
    def output_tokens_per_second(self) -> float:
        """Throughput: output tokens of the completed requests / duration."""
        return self.num_output_tokens / self.duration


def measure(timelines: Sequence[RequestTimeline], num_failed: int) -> Measurement:
    """Compute the figures of a run.

    Raises:
        ValueError: no request completed, so that there is no figure to give.
    """
    if not timelines:
        raise ValueError(f"none of {num_failed} requests completed")
    tpots = [tpot for timeline in timelines if (tpot := timeline.tpot) is not None]
    start = min(timeline.sent for timeline in timelines)
    return Measurement(
        num_completed=len(timelines),
        num_failed=num_failed,
        duration=max(timeline.last_token for timeline in timelines) - start,
        num_input_tokens=sum(timeline.num_input_tokens for timeline in timelines),
        num_output_tokens=sum(timeline.num_output_tokens for timeline in timelines),
        ttft=Distribution.of([timeline.ttft for timeline in timelines]),
        tpot=Distribution.of(tpots),
        e2e=Distribution.of([timeline.e2e for timeline in timelines]),
    )
