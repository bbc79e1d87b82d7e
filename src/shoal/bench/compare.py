"""`shoal bench compare`: the strategies on one workload, as pictures, a table and words."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn

from shoal.bench.comparison.advice import advice_on
from shoal.bench.comparison.comparison import Comparison, Runner, run_in_process
from shoal.bench.progress import progress_bar
from shoal.bench.results.disturbance import warnings_on
from shoal.bench.results.machine import Machine
from shoal.bench.results.measure import Slo
from shoal.bench.results.report import write_json
from shoal.bench.runs.replay import replay_in_process
from shoal.bench.runs.served_strategy import ServedRunner
from shoal.bench.workloads.lengths import LengthRange
from shoal.bench.workloads.workload import (
    ComparedWorkload,
    Workload,
    generate_requests,
    ordinary_token_ids,
)
from shoal.config import ConfigError, EngineConfig, InstructionSet, SchedulerName
from shoal.engine.loading import load_text_interface
from shoal.model.loader import open_model
from shoal.model.registry import resolve

ALL_STRATEGIES: tuple[SchedulerName, ...] = ("static", "dynamic", "continuous")
_WARM_UP = Workload(num_requests=4, input_len=LengthRange(64, 64), output_len=LengthRange(4, 4))


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CompareConfig:
    """Settings of `shoal bench compare`.

    Raises:
        ConfigError: a value is outside its range.
    """

    workload: ComparedWorkload = field(default_factory=ComparedWorkload)
    """What is asked of each strategy."""

    scheduler: tuple[SchedulerName, ...] = ALL_STRATEGIES
    """The strategies, may be repeated."""

    model: str = "smollm2-135m"
    """An alias, a path to a .gguf file, or hf:owner/name:file."""

    max_num_seqs: int = 8
    """Slots."""

    max_num_batched_tokens: int | None = None
    """Token budget of a step, for static and continuous."""

    kv_cache_memory_mib: int = 1024
    """Size of the KV block pool in MiB."""

    num_threads: int | None = None
    """Compute threads; what affinity and cgroup quota allow when not set."""

    instruction_set: InstructionSet | None = None
    """What the kernels use; the best that the processor has when not set."""

    max_queue_delay: float | None = None
    """How long batches of static and dynamic wait to fill; their defaults when not set."""

    skip_padding: bool = False
    """Let static and dynamic leave out the rows of requests that are done."""

    load: tuple[float, ...] = (0.4, 0.7, 1.0)
    """Offered loads as shares of the highest throughput of all strategies, may be repeated."""

    slo: Slo = field(default_factory=Slo)
    """Limits for goodput."""

    served: bool = False
    """Give each run a server of its own and ask it over HTTP; without it the engine runs in this
    process."""

    output: Path = Path("comparison.html")
    """File for the report; its JSON and its pictures lie beside it."""

    def __post_init__(self) -> None:
        if self.output.suffix == ".json":
            raise ConfigError(f"output must not be its own .json, got {self.output}")
        if not all(0 < load <= 10 for load in self.load):
            raise ConfigError(f"load must be above 0 and at most 10, got {self.load}")
        if not self.scheduler or len(set(self.scheduler)) < len(self.scheduler):
            raise ConfigError(f"scheduler must name each strategy once, got {self.scheduler}")
        if len(set(self.load)) < len(self.load):
            raise ConfigError(f"load must name each load once, got {self.load}")
        if self.scheduler == ("continuous",) and (self.max_queue_delay is not None):
            raise ConfigError("max_queue_delay is a setting of static and dynamic batching")
        if self.scheduler == ("continuous",) and self.skip_padding:
            raise ConfigError("skip_padding is a setting of static and dynamic batching")
        if self.scheduler == ("dynamic",) and self.max_num_batched_tokens is not None:
            raise ConfigError("max_num_batched_tokens is compared for static and continuous alone")

    def engine(self, scheduler: SchedulerName) -> EngineConfig:
        """The engine of one strategy, with those of the settings that it has."""
        config = EngineConfig(
            scheduler=scheduler,
            model=self.model,
            max_num_seqs=self.max_num_seqs,
            kv_cache_memory_mib=self.kv_cache_memory_mib,
            num_threads=self.num_threads,
            instruction_set=self.instruction_set,
        )
        if scheduler != "dynamic":
            config = dataclasses.replace(config, max_num_batched_tokens=self.max_num_batched_tokens)
        if scheduler != "continuous":
            config = dataclasses.replace(
                config, max_queue_delay=self.max_queue_delay, skip_padding=self.skip_padding
            )
        return config


def run(config: Annotated[CompareConfig | None, Parameter(name="*")] = None) -> int:
    """Measure, write the report, print the table; returns 1 when a request failed.

    Raises:
        ConfigError, ModelError: an engine can't be built, the workload can't be made, the report
            can't be written, or matplotlib isn't installed.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("the pictures need matplotlib: pip install 'shoal[bench]'")
    # It needs matplotlib, which is an extra.
    from shoal.bench.comparison.report import (  # noqa: PLC0415 - slow
        require_output,
        results_table,
        write_html,
    )

    config = config or CompareConfig()
    require_output(config.output)
    comparison = _prepare(config)
    _measure(comparison)
    advice = advice_on(comparison)
    content = _content(config, comparison, advice)
    write_json(config.output.with_suffix(".json"), content)
    write_html(config.output, comparison, content)
    console = Console()
    console.print(results_table(comparison))
    if content["num_requests_cut"]:
        cut = f"{content['num_requests_cut']} of the {content['num_requests']} requests"
        console.print(f"{cut} were cut to the limits given", highlight=False)
    for sentence in advice:
        console.print(f"- {sentence}", highlight=False)
    for sentence in content["warnings"] + content["failures"]:
        console.print(f"! {sentence}", highlight=False)
    console.print(f"Report: {config.output}", highlight=False)
    return int(any(run.figures["requests_failed"] > 0 for _, _, run in comparison.rows()))


def _prepare(config: CompareConfig) -> Comparison:
    """Draw the requests, and run a few once so that no strategy pays for a cold machine."""
    configs: dict[str, EngineConfig] = {name: config.engine(name) for name in config.scheduler}
    model = open_model(resolve(config.model, progress=True))
    vocabulary = ordinary_token_ids(load_text_interface(model).tokenizer)
    warm_up = generate_requests(_WARM_UP, vocabulary)
    if config.served:
        runner: Runner = ServedRunner(warm_up)
    else:
        runner = run_in_process
        replay_in_process(configs[config.scheduler[0]], warm_up, [0.0] * len(warm_up))
    requests = generate_requests(config.workload, vocabulary)
    return Comparison(configs, requests, config.load, config.slo, config.workload.seed, runner)


def _measure(comparison: Comparison) -> None:
    begun = itertools.count()
    columns = (MofNCompleteColumn(), TimeElapsedColumn())
    with progress_bar(*columns, total=comparison.num_runs) as update:
        comparison.measure_all(lambda what: update(description=what, completed=next(begun)))
        update(completed=comparison.num_runs)


def _content(config: CompareConfig, comparison: Comparison, advice: list[str]) -> dict[str, Any]:
    return {
        "benchmark": "compare",
        "shoal": version("shoal"),
        "machine": asdict(Machine.this()),
        "settings": asdict(config),
        "num_requests": len(comparison.requests),
        "num_requests_cut": sum(request.cut for request in comparison.requests),
        "mode": "served" if config.served else "in this process",
        "mode_in_words": _mode_in_words(config),
        "capacity_requests_per_second": comparison.capacity,
        "advice": advice,
        "warnings": warnings_on(
            {f"{strategy}, {load}": run.figures for load, strategy, run in comparison.rows()},
            "runs",
        ),
        "failures": list(_failures_in_words(comparison)),
        "runs": [
            {
                "load": load,
                "strategy": strategy,
                "rate": run.rate,
                "figures": run.figures,
                "failures": run.outcome.failures_by_kind,
            }
            for load, strategy, run in comparison.rows()
        ],
    }


def _mode_in_words(config: CompareConfig) -> str:
    kernels = f"Kernels: {config.instruction_set}. " if config.instruction_set else ""
    if not config.served:
        return kernels + (
            "The engine ran in the process of the benchmark: no HTTP, no second process. It is "
            "told when the last request has come, so that no batch waits in vain to fill."
        )
    mode = kernels + (
        "Each run had a server of its own (shoal serve), asked over HTTP by a load generator on "
        "the same machine; steps and queueing times are from the server's step trace."
    )
    delays = [
        f"a {name} batch waits up to {config.engine(name).for_serving().queue_delay:g} s to fill"
        for name in config.scheduler
        if name != "continuous"
    ]
    if delays:
        mode += f" A server can't know which request is the last: {', '.join(delays)}."
    return mode


def _failures_in_words(comparison: Comparison) -> Iterator[str]:
    """One sentence for each kind of failure in a run, with what was said the first time."""
    for load, strategy, run in comparison.rows():
        for kind, count in run.outcome.failures_by_kind.most_common():
            message = next(f.message for f in run.outcome.failures if f.kind == kind)
            yield f"{strategy}, {load}: {count} x {kind}; the first: {message}"
