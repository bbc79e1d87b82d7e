"""When requests are sent: in an open loop at their times, in a closed loop as answers end."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cyclopts import Parameter

from shoal.bench.workloads.workload import WorkloadRequest
from shoal.config import ConfigError


class ArrivalError(ConfigError):
    """The settings of arrivals contradict each other; the message names both."""


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests are sent at `times`, in seconds after the start, whatever the answers do."""

    times: tuple[float, ...]
    description: str

    @property
    def offered_rate(self) -> float | None:
        """Requests a second that these times offer; None where they are all the same."""
        if not self.times or (span := self.times[-1] - self.times[0]) <= 0:
            return None
        return (len(self.times) - 1) / span


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users each send the next request when the answer to the last has ended.

    Between the two a user waits `think_time` seconds. With it, users begin at random times within
    the first `think_time`, drawn from `seed`, lest they all move in step.
    """

    concurrency: int
    think_time: float = 0.0
    seed: int = 0

    @property
    def description(self) -> str:
        """The mode in words."""
        think = f", {self.think_time:g} s think time" if self.think_time else ""
        return f"closed loop, concurrency {self.concurrency}{think}"


Arrivals = OpenLoop | ClosedLoop


def gamma_arrivals(rate: float, burstiness: float, count: int, seed: int) -> OpenLoop:
    """An open loop with gamma-distributed gaps of mean 1 / `rate` seconds; the first is at 0.

    `burstiness` is the shape of the distribution: 1 is a Poisson process, smaller comes in bursts,
    larger is more regular (the convention of vLLM's benchmark). The same seed gives the same gaps,
    stretched, at every rate. An infinite rate sends all at once.
    """
    if math.isinf(rate):
        return OpenLoop((0.0,) * count, "open loop, all at once")
    rng = random.Random(f"arrivals {seed}")
    gaps = [rng.gammavariate(burstiness, 1 / burstiness) / rate for _ in range(count - 1)]
    times = tuple(accumulate(gaps, initial=0.0))
    return OpenLoop(times, f"open loop, {process_in_words(burstiness)}, {rate:g} requests/s")


def process_in_words(burstiness: float) -> str:
    """What the arrivals of that burstiness are called."""
    return "Poisson" if burstiness == 1 else f"Gamma, burstiness {burstiness:g}"


def trace_arrivals(requests: Sequence[WorkloadRequest], time_scale: float) -> OpenLoop:
    """An open loop with the arrivals of a trace, `time_scale` times as far apart.

    Raises:
        ArrivalError: the trace tells no arrivals.
    """
    times = [request.arrival for request in requests if request.arrival is not None]
    if len(times) < len(requests):
        raise ArrivalError("the trace tells no arrivals: give request_rate or concurrency")
    scale = "" if time_scale == 1 else f", time scale {time_scale:g}"
    return OpenLoop(tuple(time * time_scale for time in times), f"open loop, trace{scale}")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalConfig:
    """How requests arrive: by a rate, by a trace's times, or by a number of users.

    Raises:
        ArrivalError: a value is outside its range, or two settings contradict each other.
    """

    request_rate: float | None = None
    """Open loop: requests a second at random times; inf sends all at once."""

    burstiness: float | None = None
    """Open loop: shape of the Gamma distribution of the gaps. 1, the default, is a Poisson process;
    smaller comes in bursts, larger is more regular."""

    time_scale: float | None = None
    """Open loop with a trace's arrivals: factor on its times; 0.5 sends twice as fast."""

    concurrency: int | None = None
    """Closed loop: this many requests in flight, the next is sent when one ends."""

    think_time: float | None = None
    """Closed loop: seconds that each user waits before the next request."""

    def __post_init__(self) -> None:
        for name in ("request_rate", "burstiness", "time_scale", "concurrency"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ArrivalError(f"{name} must be above 0, got {value}")
            if name != "request_rate" and value == math.inf:
                raise ArrivalError(f"{name} must be finite")
        if self.think_time is not None and not 0 <= self.think_time < math.inf:
            raise ArrivalError(f"think_time must be 0 or more, got {self.think_time}")
        for name, other, why in (
            ("concurrency", "request_rate", "a closed loop has no rate of its own"),
            ("concurrency", "burstiness", "a closed loop has no arrivals to be bursty"),
            ("concurrency", "time_scale", "a closed loop ignores a trace's times"),
            ("request_rate", "time_scale", "the rate replaces a trace's times"),
            ("burstiness", "time_scale", "a trace's times have their own gaps"),
        ):
            if getattr(self, name) is not None and getattr(self, other) is not None:
                raise ArrivalError(f"{other} contradicts {name}: {why}")
        if self.think_time is not None and self.concurrency is None:
            raise ArrivalError("think_time needs concurrency: it is the users of a closed loop")

    def check_complete(self, *, has_trace: bool) -> None:
        """Refuse settings that don't say when to send.

        Raises:
            ArrivalError: nothing says when to send, or what does needs something else.
        """
        if self.burstiness is not None and self.request_rate is None:
            raise ArrivalError("burstiness needs request_rate: it says how the gaps vary")
        if self.time_scale is not None and not has_trace:
            raise ArrivalError("time_scale needs trace: it stretches a trace's times")
        if self.concurrency is None and self.request_rate is None and not has_trace:
            raise ArrivalError(
                "say how requests arrive: request_rate (open loop), concurrency (closed loop), "
                "or a trace with arrivals"
            )

    def arrivals(self, requests: Sequence[WorkloadRequest], seed: int) -> Arrivals:
        """The arrivals of `requests`: those of their trace if neither rate nor users are given.

        Raises:
            ArrivalError: the requests have no times of their own, and nothing else says when.
        """
        if self.concurrency is not None:
            return ClosedLoop(self.concurrency, self.think_time or 0.0, seed)
        if self.request_rate is not None:
            return gamma_arrivals(self.request_rate, self.burstiness or 1.0, len(requests), seed)
        return trace_arrivals(requests, self.time_scale or 1.0)
