"""The highest request rate at which enough requests meet the SLO, found by measuring."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cyclopts import Parameter

from shoal.bench.results.measure import Slo
from shoal.bench.workloads.arrivals import ArrivalConfig
from shoal.config import ConfigError

FIRST_RATE = 1.0
LOWEST_RATE, HIGHEST_RATE = 2.0**-6, 2.0**14  # requests a second; the search goes no further


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """How to search for the capacity.

    Raises:
        ConfigError: a value is outside its range.
    """

    find_capacity: bool = False
    """Search for the highest rate at which enough requests meet the SLO. Requests come as a Poisson
    process, or with the given burstiness."""

    slo_share: float = 0.9
    """Share of the requests that has to meet the SLO."""

    capacity_seconds: float = 30.0
    """Least length of each run of the search; num_requests is its least size."""

    capacity_precision: float = 0.1
    """The search ends when the least rate that is too high is at most so much above the answer."""

    def __post_init__(self) -> None:
        if not 0 < self.slo_share <= 1:
            raise ConfigError(f"slo_share must be above 0 and at most 1, got {self.slo_share}")
        if not 0 < self.capacity_seconds < math.inf:
            raise ConfigError(f"capacity_seconds must be above 0, got {self.capacity_seconds}")
        if not 0.01 <= self.capacity_precision <= 1:
            raise ConfigError(
                f"capacity_precision must be between 0.01 and 1, got {self.capacity_precision}"
            )

    def check(self, slo: Slo, arrivals: ArrivalConfig) -> None:
        """Refuse what contradicts a search, or asks for one without beginning it.

        Raises:
            ConfigError: naming the settings.
        """
        if not self.find_capacity:
            for name in ("slo_share", "capacity_seconds", "capacity_precision"):
                if getattr(self, name) != getattr(_DEFAULTS, name):
                    raise ConfigError(f"{name} needs find_capacity: it is a setting of the search")
            return
        if not slo:
            raise ConfigError("find_capacity needs slo_ttft, slo_tpot or slo_e2e")
        for name in ("request_rate", "concurrency", "think_time", "time_scale"):
            if getattr(arrivals, name) is not None:
                raise ConfigError(f"{name} contradicts find_capacity, which chooses the rates")

    def num_requests(self, rate: float, at_least: int) -> int:
        """Requests of a run at `rate`."""
        return max(at_least, math.ceil(rate * self.capacity_seconds))


_DEFAULTS = CapacityConfig()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a search found, in requests a second.

    The capacity is `rate`; `too_high` is the least rate tried at which too few requests met the
    SLO. `rate` is 0 if that was so at every rate, `too_high` infinite if at none. Both are 0 if too
    few meet it without any load, so that no rate can be kept.
    """

    rate: float
    too_high: float


@dataclass(slots=True)
class RateSearch:
    """Brackets the capacity by multiplying or dividing the rate by `factor`, then bisects.

    Ask for the share at `rate`, tell with `note` whether it was kept, until it is `done`: when the
    least rate that is too high is at most (1 + `precision`) times the highest that isn't.
    """

    precision: float
    rate: float = FIRST_RATE
    factor: float = 2.0
    low: float = 0.0
    high: float = math.inf

    @property
    def done(self) -> bool:
        """Whether the rates are close enough, or beyond what is searched."""
        is_close = self.high <= self.low * (1 + self.precision)
        return is_close or not LOWEST_RATE <= self.rate <= HIGHEST_RATE

    @property
    def capacity(self) -> Capacity:
        """What is known so far."""
        return Capacity(self.low, self.high)

    def note(self, *, kept: bool) -> None:
        """Take in whether enough requests met the SLO at `rate`, and choose the next rate."""
        if kept:
            self.low = self.rate
        else:
            self.high = self.rate
        if math.isinf(self.high):
            self.rate = self.low * self.factor
        elif self.low == 0:
            self.rate = self.high / self.factor
        else:
            self.rate = math.sqrt(self.low * self.high)


SUSTAINED_SHARE = 2 / 3
"""Of a rate that has to be achieved, lest a queue swallow what a server can't do. It isn't all, for
the last answers of a run take their time."""

UNLOADED_REQUESTS = 32
"""At most so many are sent one at a time, to see whether the SLO can be met at all."""


async def find_capacity(
    is_kept: Callable[[float], Awaitable[bool]],
    is_kept_unloaded: Callable[[], Awaitable[bool]],
    precision: float,
) -> Capacity:
    """Search for the capacity.

    Args:
        is_kept: measures whether a rate is achieved and enough requests meet the SLO at it.
        is_kept_unloaded: measures whether enough do when they are sent one at a time. It is asked
            if the first rate isn't kept, lest the search go on to ever lower ones in vain.
        precision: that of `RateSearch`.
    """
    search = RateSearch(precision)
    while not search.done:
        kept = await is_kept(search.rate)
        if not kept and search.rate == FIRST_RATE and not await is_kept_unloaded():
            return Capacity(0.0, 0.0)
        search.note(kept=kept)
    return search.capacity
