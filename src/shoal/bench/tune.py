"""`shoal tune`: the strategy and the limits for a workload, found by measuring."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn

from shoal.bench.progress import progress_bar
from shoal.bench.results.machine import Machine
from shoal.bench.results.measure import Slo
from shoal.bench.results.output_path import require_writable
from shoal.bench.results.report import write_json
from shoal.bench.runs.replay import replay_in_process
from shoal.bench.tuning.objectives import (
    GoodShare,
    HighestRate,
    Throughput,
    TrialBench,
    Watched,
)
from shoal.bench.tuning.report import as_json, command, sentences, trials_table
from shoal.bench.tuning.search import Budget, OnTrial, Search
from shoal.bench.tuning.space import Space
from shoal.bench.tuning.trial import Objective
from shoal.bench.workloads.arrivals import gamma_arrivals, trace_arrivals
from shoal.bench.workloads.workload import (
    TrialWorkload,
    WorkloadRequest,
    generate_requests,
    ordinary_token_ids,
)
from shoal.config import ConfigError, EngineConfig, InstructionSet, SchedulerName
from shoal.engine.loading import load_text_interface
from shoal.model.loader import open_model
from shoal.model.registry import resolve

STRATEGIES: tuple[SchedulerName, ...] = ("continuous", "dynamic", "static")
DEFAULT_SLO_SHARE = 0.9


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """Settings of `shoal tune`.

    Raises:
        ConfigError: a value is outside its range, or two settings contradict each other.
    """

    workload: TrialWorkload = field(default_factory=TrialWorkload)
    """What is asked in each trial."""

    slo: Slo = field(default_factory=Slo)
    """What a good answer is; without it the throughput counts."""

    slo_share: float = DEFAULT_SLO_SHARE
    """Share of the requests that has to meet the SLO."""

    request_rate: float | None = None
    """With an SLO: requests a second, a Poisson process. When not set: the arrivals of the trace,
    or, without one, the highest rate at which enough requests meet the SLO."""

    budget_minutes: float = 10.0
    """How long the search may take."""

    scheduler: tuple[SchedulerName, ...] = STRATEGIES
    """The strategies to try, may be repeated."""

    model: str = "smollm2-135m"
    """An alias, a path to a .gguf file, or hf:owner/name:file."""

    kv_cache_memory_mib: int = 1024
    """Size of the KV block pool in MiB."""

    num_threads: int | None = None
    """Compute threads; what affinity and cgroup quota allow when not set."""

    instruction_set: InstructionSet | None = None
    """What the kernels use; the best that the processor has when not set."""

    json: Path | None = None
    """File to write the result to, with machine, versions and settings."""

    def __post_init__(self) -> None:
        if not 0 < self.slo_share <= 1:
            raise ConfigError(f"slo_share must be above 0 and at most 1, got {self.slo_share}")
        if self.slo_share != DEFAULT_SLO_SHARE and not self.slo:
            raise ConfigError("slo_share needs slo_ttft, slo_tpot or slo_e2e: it is their share")
        if self.request_rate is not None:
            if not 0 < self.request_rate < math.inf:
                raise ConfigError(f"request_rate must be above 0, got {self.request_rate}")
            if not self.slo:
                raise ConfigError(
                    "request_rate needs slo_ttft, slo_tpot or slo_e2e: without them throughput "
                    "counts, which is measured with all requests there"
                )
        if not 0 < self.budget_minutes < math.inf:
            raise ConfigError(f"budget_minutes must be above 0, got {self.budget_minutes}")
        if not self.scheduler or len(set(self.scheduler)) < len(self.scheduler):
            raise ConfigError(f"scheduler must name each strategy once, got {self.scheduler}")

    @property
    def engine(self) -> EngineConfig:
        """The settings that all trials share."""
        return EngineConfig(
            model=self.model,
            kv_cache_memory_mib=self.kv_cache_memory_mib,
            num_threads=self.num_threads,
            instruction_set=self.instruction_set,
        )


_DEFAULTS = TuneConfig()


def run(config: Annotated[TuneConfig, Parameter(name="*")] = _DEFAULTS) -> int:
    """Search, print what was tried, and the command that serves with the best; returns 0.

    Raises:
        ConfigError, ModelError: an engine can't be built, the workload can't be made, or `json`
            can't be written.
        BenchError: the budget is too short for one trial, or every trial failed.
    """
    if config.json is not None:
        require_writable("json", config.json)
    budget = Budget(config.budget_minutes * 60)
    bench = _prepare(config)
    objective, goal = _objective(config, bench)
    strategies = [name for name in STRATEGIES if name in config.scheduler]
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in bench.requests)
    space = Space(strategies, len(bench.requests), num_prompt_tokens)
    print(f"Looking for the {goal}, for at most {config.budget_minutes:g} minutes")
    with _progress(budget) as on_trial:
        found = Search(space, Watched(objective), budget, on_trial).run()
    share = config.slo_share if config.slo else None
    words = sentences(found, space, config.engine, share)
    line = command(config.engine, found.best.setting)
    Console().print(trials_table(found))
    print("\n".join([*words, line]))
    if config.json is not None:
        result = {"goal": goal, "command": line, "words": words} | as_json(found)
        write_json(config.json, _context(config) | result)
    return 0


def _prepare(config: TuneConfig) -> TrialBench:
    """Draw the requests, and run one so that the first trial doesn't pay for a cold machine."""
    model = open_model(resolve(config.model, progress=True))
    vocabulary = ordinary_token_ids(load_text_interface(model).tokenizer)
    requests = generate_requests(config.workload, vocabulary)
    replay_in_process(config.engine, requests[:1], [0.0])
    return TrialBench(config.engine, requests, config.slo)


def _objective(config: TuneConfig, bench: TrialBench) -> tuple[Objective, str]:
    """What is wanted, and the same in words."""
    if not config.slo:
        return Throughput(bench), "highest throughput, all requests being there"
    seed, requests = config.workload.seed, bench.requests
    if config.request_rate is not None:
        arrivals = gamma_arrivals(config.request_rate, 1.0, len(requests), seed)
    elif _tell_arrivals(requests):
        arrivals = trace_arrivals(requests, 1.0)
    else:
        goal = f"highest Poisson rate at which {config.slo_share:.0%} of the requests meet the SLO"
        return HighestRate(bench, config.slo_share, seed), goal
    objective = GoodShare(bench, arrivals.times, arrivals.offered_rate)
    return objective, f"highest goodput, {arrivals.description}"


def _tell_arrivals(requests: Sequence[WorkloadRequest]) -> bool:
    return all(request.arrival is not None for request in requests)


def _context(config: TuneConfig) -> dict[str, Any]:
    return {
        "benchmark": "tune",
        "shoal": version("shoal"),
        "machine": asdict(Machine.this()),
        "settings": asdict(config),
    }


@contextmanager
def _progress(budget: Budget) -> Iterator[OnTrial]:
    """A bar over the budget, which tells what is being tried."""
    columns = (TimeElapsedColumn(), TextColumn(f"of {budget.seconds / 60:g} min"))
    with progress_bar(*columns, total=budget.seconds) as update:
        yield lambda what, spent: update(description=what, completed=spent)
