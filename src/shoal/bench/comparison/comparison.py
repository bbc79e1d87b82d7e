"""Several strategies on one workload: all at once, then at rising loads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.bench.errors import BenchError
from shoal.bench.results.disturbance import CpuWatch
from shoal.bench.results.measure import Slo
from shoal.bench.results.report import Figures
from shoal.bench.runs.outcome import Outcome
from shoal.bench.runs.replay import replay_in_process
from shoal.bench.workloads.arrivals import gamma_arrivals, trace_arrivals
from shoal.bench.workloads.workload import WorkloadRequest
from shoal.config import EngineConfig

AT_ONCE = "all at once"

Runner = Callable[[EngineConfig, Sequence[WorkloadRequest], Sequence[float]], Outcome]
"""Makes one run: requests that arrive at these times (seconds), with these settings."""


def run_in_process(
    config: EngineConfig, requests: Sequence[WorkloadRequest], times: Sequence[float]
) -> Outcome:
    """The `Runner` that has the engine in this process.

    Raises:
        ConfigError, ModelError: the engine can't be built.
    """
    return replay_in_process(config, requests, times).outcome


@dataclass(frozen=True, slots=True)
class Run:
    """One strategy at one load. `rate` is in requests a second; None: all at once."""

    strategy: str
    rate: float | None
    outcome: Outcome
    figures: Figures


@dataclass(slots=True)
class Comparison:
    """All runs of one workload, and the loads as shares of the best throughput."""

    configs: dict[str, EngineConfig]  # by the name of the strategy
    requests: Sequence[WorkloadRequest]
    loads: Sequence[float]
    slo: Slo
    seed: int
    runner: Runner = run_in_process
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
        """Make all runs, the strategies alternating; `on_run` is told of each before it begins.

        Raises:
            BenchError: no request of a run completed.
            ConfigError, ModelError: an engine can't be built.
        """
        for strategy in self.configs:
            on_run(f"{strategy}, {AT_ONCE}")
            self.at_once[strategy] = self._run(strategy, None)
        for load in self.loads:
            self.loaded[load] = {}
            for strategy in self.configs:
                on_run(f"{strategy}, {load:.0%} load")
                self.loaded[load][strategy] = self._run(strategy, load * self.capacity)

    def _run(self, strategy: str, rate: float | None) -> Run:
        watch = CpuWatch()
        outcome = self.runner(self.configs[strategy], self.requests, self._times(rate))
        disturbance = watch.figures()
        try:
            figures = outcome.figures(self.slo)
        except BenchError as error:
            raise BenchError(f"{strategy}: {error}") from error
        return Run(strategy, rate, outcome, figures | disturbance)

    def _times(self, rate: float | None) -> Sequence[float]:
        """Arrivals at a mean rate: those of a trace, stretched, or a Poisson process."""
        if rate is None:
            return [0.0] * len(self.requests)
        if any(request.arrival is None for request in self.requests):
            return gamma_arrivals(rate, 1.0, len(self.requests), self.seed).times
        natural = trace_arrivals(self.requests, 1.0)
        return trace_arrivals(self.requests, (natural.offered_rate or rate) / rate).times
