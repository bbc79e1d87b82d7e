"""Several strategies on one workload: all at once, then at rising loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from shoal.bench.arrivals import gamma_arrivals, trace_arrivals
from shoal.bench.measure import Slo, measure
from shoal.bench.replay import Replay, ReplayEngine
from shoal.bench.report import Figures, figures_of
from shoal.bench.workload import WorkloadRequest
from shoal.config import EngineConfig

AT_ONCE = "all at once"


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy at one load. `rate` is in requests a second; None: all at once."""

    strategy: str
    rate: float | None
    replay: Replay
    figures: Figures


@dataclass(slots=True)
class Comparison:
    """All runs of one workload, and the loads as shares of the best throughput."""

    configs: dict[str, EngineConfig]  # by the name of the strategy
    requests: Sequence[WorkloadRequest]
    loads: Sequence[float]
    slo: Slo
    seed: int
    at_once: dict[str, Run] = field(default_factory=dict)
    loaded: dict[float, dict[str, Run]] = field(default_factory=dict)  # by the load

    @property
    def num_runs(self) -> int:
        """How many runs `measure_all` makes."""
        return len(self.configs) * (1 + len(self.loads))

    @property
    def capacity(self) -> float:
        """Requests a second of the fastest strategy when all requests are there."""
        return max(run.figures["requests_per_second"] for run in self.at_once.values())

    @property
    def highest_load(self) -> dict[str, Run]:
        """The runs under the highest load; all at once where there is none."""
        return self.loaded[max(self.loaded)] if self.loaded else self.at_once

    def rows(self) -> Iterator[tuple[str, str, Run]]:
        """Every run with the names of its load, a share of `capacity`, and its strategy."""
        for strategy, run in self.at_once.items():
            yield AT_ONCE, strategy, run
        for load, runs in self.loaded.items():
            for strategy, run in runs.items():
                yield f"{load:.0%} load", strategy, run

    def measure_all(self, on_run: Callable[[str], None]) -> None:
        """Make all runs, the strategies alternating; `on_run` is told of each before it begins."""
        for strategy in self.configs:
            on_run(f"{strategy}, {AT_ONCE}")
            self.at_once[strategy] = self._run(strategy, None)
        for load in self.loads:
            self.loaded[load] = {}
            for strategy in self.configs:
                on_run(f"{strategy}, {load:.0%} load")
                self.loaded[load][strategy] = self._run(strategy, load * self.capacity)

    def _run(self, strategy: str, rate: float | None) -> Run:
        engine = ReplayEngine(self.configs[strategy])
        try:
            replay = engine.run(
                [request.prompt_token_ids for request in self.requests],
                [request.max_tokens for request in self.requests],
                self._times(rate),
            )
        finally:
            engine.close()
        return Run(strategy, rate, replay, replay_figures(replay, self.slo))

    def _times(self, rate: float | None) -> Sequence[float]:
        """Arrivals at a mean rate: those of a trace, stretched, or a Poisson process."""
        if rate is None:
            return [0.0] * len(self.requests)
        if any(request.arrival is None for request in self.requests):
            return gamma_arrivals(rate, 1.0, len(self.requests), self.seed).times
        natural = trace_arrivals(self.requests, 1.0)
        return trace_arrivals(self.requests, (natural.offered_rate or rate) / rate).times


def replay_figures(replay: Replay, slo: Slo) -> Figures:
    """The figures of a run by name: those of every benchmark, and what only the engine knows."""
    figures = figures_of(measure(replay.timelines, replay.num_failed, slo=slo))
    stats = replay.stats
    usage = [step.num_blocks_used / stats.num_blocks_total for step in replay.steps]
    return figures | {
        "queue_time_mean_ms": fmean(replay.queue_times) * 1e3,
        "slot_utilization": stats.slot_utilization,
        "kv_cache_usage_mean": fmean(usage),
        "kv_cache_usage_max": max(usage),
        "preemptions": stats.num_preemptions,
        "steps": stats.num_steps,
    }
