"""The figures of a benchmark, defined once.

Times are seconds on one monotonic clock. docs/benchmarking.md states the same definitions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import numpy as np
from cyclopts import Parameter

from shoal.config import ConfigError

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class RequestTimeline:
    """When one completed request was to be sent, got its first token and its last one.

    `chunk_times` are the times of the chunks with text, for answers that were streamed: a chunk
    has one token or more. `num_cached_tokens` are prompt tokens that a prefix cache had; None
    where that isn't told.
    """

    sent: float
    first_token: float
    last_token: float
    num_input_tokens: int
    num_output_tokens: int
    chunk_times: Sequence[float] = ()
    num_cached_tokens: int | None = None

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

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: the gaps between chunks; the time to the first isn't one."""
        return [later - earlier for earlier, later in pairwise(self.chunk_times)]

    @property
    def num_tokens_without_own_chunk(self) -> int:
        """Output tokens that came in a chunk with another, or had no text; 0 if not streamed."""
        if not self.chunk_times:
            return 0
        return max(0, self.num_output_tokens - len(self.chunk_times))


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a request has to meet to count as good.

    Raises:
        ConfigError: a limit is not above 0.
    """

    ttft: Annotated[float | None, Parameter(name="--slo-ttft")] = None
    """Most seconds to the first token."""

    tpot: Annotated[float | None, Parameter(name="--slo-tpot")] = None
    """Most seconds per output token after the first; a single token meets it."""

    e2e: Annotated[float | None, Parameter(name="--slo-e2e")] = None
    """Most seconds to the last token."""

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            if (limit := getattr(self, name)) is not None and not limit > 0:
                raise ConfigError(f"slo_{name} must be above 0 seconds, got {limit}")

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return (self.ttft, self.tpot, self.e2e) != (None, None, None)

    def is_met_by(self, timeline: RequestTimeline) -> bool:
        """Whether the request kept every limit."""
        return all(
            limit is None or value is None or value <= limit
            for limit, value in (
                (self.ttft, timeline.ttft),
                (self.tpot, timeline.tpot),
                (self.e2e, timeline.e2e),
            )
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The figures of one run over its completed requests; failures are counted apart.

    None is what a run can't tell: `num_refused` where refusals are failures like others,
    `num_good` without an SLO, `num_cached_tokens` without a prefix cache that tells of its hits,
    and a distribution without a sample.
    """

    num_completed: int
    num_failed: int
    num_refused: int | None
    num_good: int | None
    duration: float  # from the first send to the last token
    num_input_tokens: int
    num_cached_tokens: int | None
    num_output_tokens: int
    num_tokens_without_own_chunk: int
    num_itls: int
    ttft: Distribution | None
    itl: Distribution | None
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

    @property
    def goodput(self) -> float | None:
        """Requests a second that meet the whole SLO; None without one."""
        return None if self.num_good is None else self.num_good / self.duration

    @property
    def good_share(self) -> float | None:
        """Requests that meet the SLO / all, failed and refused ones too; None without an SLO."""
        if self.num_good is None:
            return None
        return self.num_good / (self.num_completed + self.num_failed + (self.num_refused or 0))

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Prompt tokens that the prefix cache had / prompt tokens; None if it doesn't tell."""
        if self.num_cached_tokens is None:
            return None
        return self.num_cached_tokens / max(1, self.num_input_tokens)


def measure(
    timelines: Sequence[RequestTimeline],
    num_failed: int,
    *,
    num_refused: int | None = None,
    slo: Slo | None = None,
    start: float | None = None,
) -> Measurement:
    """Compute the figures of a run.

    Args:
        timelines: the completed requests.
        num_failed: how many failed.
        num_refused: how many the server refused for want of room, where that is told.
        slo: what a request has to meet to be good.
        start: when the first request of the run was sent, if that may have been one that failed.

    Raises:
        ValueError: no request completed, so that there is no figure to give.
    """
    if not timelines:
        raise ValueError(f"none of {num_failed + (num_refused or 0)} requests completed")
    if start is None:
        start = min(timeline.sent for timeline in timelines)
    itls = [itl for timeline in timelines for itl in timeline.itls]
    cached = [n for timeline in timelines if (n := timeline.num_cached_tokens) is not None]
    return Measurement(
        num_completed=len(timelines),
        num_failed=num_failed,
        num_refused=num_refused,
        num_good=sum(map(slo.is_met_by, timelines)) if slo else None,
        duration=max(timeline.last_token for timeline in timelines) - start,
        num_input_tokens=sum(timeline.num_input_tokens for timeline in timelines),
        num_cached_tokens=sum(cached) if cached else None,
        num_output_tokens=sum(timeline.num_output_tokens for timeline in timelines),
        num_tokens_without_own_chunk=sum(t.num_tokens_without_own_chunk for t in timelines),
        num_itls=len(itls),
        ttft=Distribution.of([timeline.ttft for timeline in timelines]),
        itl=Distribution.of(itls),
        tpot=Distribution.of([tpot for t in timelines if (tpot := t.tpot) is not None]),
        e2e=Distribution.of([timeline.e2e for timeline in timelines]),
    )
