"""When a replay is given up before its end, because it can't become what it has to be."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shoal.bench.results.measure import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """A replay goes on for at most `max_seconds`, and until `max_misses` is passed.

    `max_misses` is how many requests may miss `slo`; by default any number.
    """

    max_seconds: float = math.inf
    slo: Slo = field(default_factory=Slo)
    max_misses: float = math.inf

    @property
    def counts_misses(self) -> bool:
        """Whether it matters how many requests miss the SLO."""
        return math.isfinite(self.max_misses)

    def is_missed(self, waited: float, *, has_token: bool) -> bool:
        """Whether a request that arrived `waited` seconds ago and goes on has missed the SLO."""
        too_late = self.slo.ttft is not None and not has_token and waited > self.slo.ttft
        return too_late or (self.slo.e2e is not None and waited > self.slo.e2e)


ENDLESS = Patience()
