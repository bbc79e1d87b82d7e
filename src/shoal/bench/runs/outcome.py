"""What came of a run, and its figures: the same for an engine in this process and for a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from shoal.bench.client.load import REFUSED, Failure
from shoal.bench.errors import BenchError
from shoal.bench.results.measure import RequestTimeline, Slo, measure
from shoal.bench.results.report import Figures, figures_of
from shoal.bench.runs.steps import EngineRecord


@dataclass(frozen=True, slots=True)
class Outcome:
    """The completed requests of a run, the others, and what the engine did.

    `extra` are figures that only this kind of run has. `start` is when the first request was
    sent, where that may have been one that failed; times are seconds on one clock.
    """

    timelines: Sequence[RequestTimeline]
    failures: Sequence[Failure]
    engine: EngineRecord
    extra: Figures = field(default_factory=dict)
    start: float | None = None

    @property
    def failures_by_kind(self) -> Counter[str]:
        """How many failures of each kind there were, refused requests included."""
        return Counter(failure.kind for failure in self.failures)

    def figures(self, slo: Slo) -> Figures:
        """The figures by name: those of every benchmark, and what only the engine knows.

        Raises:
            BenchError: no request completed.
        """
        if not self.timelines:
            raise BenchError(f"no request completed; the first failure: {self._first_failure()}")
        num_refused = self.failures_by_kind[REFUSED]
        measured = measure(
            self.timelines,
            len(self.failures) - num_refused,
            num_refused=num_refused,
            slo=slo,
            start=self.start,
        )
        return figures_of(measured) | self._engine_figures() | self.extra

    def _engine_figures(self) -> Figures:
        usage = self.engine.kv_usage
        return {
            "queue_time_mean_ms": fmean(self.engine.queue_times) * 1e3,
            "slot_utilization": self.engine.slot_utilization,
            "kv_cache_usage_mean": fmean(usage),
            "kv_cache_usage_max": max(usage),
            "preemptions": self.engine.num_preemptions,
            "steps": len(self.engine.steps),
        }

    def _first_failure(self) -> str:
        if not self.failures:
            return "none, there was no request"
        return f"{self.failures[0].kind}, {self.failures[0].message}"
