"""`shoal bench serve`: load on any server with OpenAI's API, and what its users would see."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import uvloop
from cyclopts import Parameter
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from shoal.bench.client.connection import HttpClient
from shoal.bench.client.target import Target, TargetConfig, connect
from shoal.bench.progress import progress_bar
from shoal.bench.results.machine import Machine
from shoal.bench.results.measure import Slo
from shoal.bench.results.output_path import require_writable
from shoal.bench.results.report import Figures, print_table, write_json
from shoal.bench.runs.capacity import (
    SUSTAINED_SHARE,
    UNLOADED_REQUESTS,
    Capacity,
    CapacityConfig,
    find_capacity,
)
from shoal.bench.runs.served import Plan, PreparationConfig, ServedRun, run_once
from shoal.bench.workloads.arrivals import ArrivalConfig, process_in_words
from shoal.bench.workloads.workload import Workload


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of `shoal bench serve`.

    Raises:
        ConfigError: two settings contradict each other.
    """

    target: TargetConfig = field(default_factory=TargetConfig)
    """The server."""

    workload: Workload = field(default_factory=Workload)
    """What is asked."""

    arrivals: ArrivalConfig = field(default_factory=ArrivalConfig)
    """When it is asked."""

    slo: Slo = field(default_factory=Slo)
    """What a good answer is."""

    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    """How to search for the capacity."""

    preparation: PreparationConfig = field(default_factory=PreparationConfig)
    """What happens before the first measured request."""

    json: Path | None = None
    """File to write the result to, with machine, versions and settings."""

    def __post_init__(self) -> None:
        self.capacity.check(self.slo, self.arrivals)
        if not self.capacity.find_capacity:
            self.arrivals.check_complete(has_trace=self.workload.trace is not None)

    @property
    def plan(self) -> Plan:
        """What one run of it does."""
        return Plan(
            workload=self.workload,
            arrivals=self.arrivals,
            slo=self.slo,
            preparation=self.preparation,
        )


def run(config: Annotated[ServeConfig | None, Parameter(name="*")] = None) -> int:
    """Measure and print; returns the exit status, 1 when a request failed.

    Refused requests are counted apart and are no failures.

    Raises:
        ConfigError: two settings contradict each other, or the file can't be written.
        BenchError: the server can't be reached, doesn't answer, or isn't one of OpenAI's API.
    """
    config = config if config is not None else ServeConfig()
    if config.json is not None:
        require_writable("json", config.json)
    return uvloop.run(_run(config))


async def _run(config: ServeConfig) -> int:
    api_key = config.target.api_key or os.environ.get("SHOAL_API_KEY")
    async with HttpClient(config.target.base_url, api_key) as client:
        target = await connect(client, config.target)
        if config.capacity.find_capacity:
            return await _find_capacity(config, target)
        return await _measure(config, target)


async def _measure(config: ServeConfig, target: Target) -> int:
    served = await _run_with_bar(target, config.plan, "requests")
    facts = _facts(target) | {
        "arrivals": served.arrivals.description,
        "prefix_cache": served.prefix_cache,
    }
    _print_facts(facts)
    _print_failures(served)
    figures = served.figures
    print_table("As the clients saw it", figures)
    if config.json is not None:
        content = {"run": facts, "figures": figures, "failures": served.load.failures_by_kind}
        write_json(config.json, _context(config) | content)
    return 1 if served.num_failed or served.measurement is None else 0


async def _find_capacity(config: ServeConfig, target: Target) -> int:
    probes = _Probes(config, target)
    capacity = await find_capacity(
        probes.is_kept, probes.is_kept_unloaded, config.capacity.capacity_precision
    )
    facts = _facts(target) | {"arrivals": _process(config), "slo": _slo_in_words(config)}
    _print_facts(facts)
    Console().print(_probe_table(probes.rates))
    print(_verdict(capacity, probes.unloaded))
    if config.json is not None:
        found = {
            "capacity_requests_per_second": capacity.rate,
            "too_high_requests_per_second": _finite(capacity.too_high),
        }
        content = {"run": facts, "figures": found, "probes": probes.rates}
        if probes.unloaded:
            content["unloaded"] = probes.unloaded
        write_json(config.json, _context(config) | content)
    return 1 if probes.num_failed or capacity.rate == 0 else 0


@dataclass(slots=True)
class _Probes:
    """The measurements of a search: at the `rates` in the order tried, and without any load."""

    config: ServeConfig
    target: Target
    rates: list[Figures] = field(default_factory=list)
    unloaded: Figures = field(default_factory=dict)
    num_failed: int = 0

    async def is_kept(self, rate: float) -> bool:
        """Whether `rate` is achieved, and enough requests meet the SLO at it."""
        num_requests = self.config.capacity.num_requests(rate, self.config.workload.num_requests)
        arrivals = replace(self.config.arrivals, request_rate=rate)
        served = await self._measure(f"{rate:.3g} requests/s", num_requests, arrivals)
        offered = served.figures.get("offered_requests_per_second", rate)
        achieved = served.figures.get("requests_per_second", 0.0)
        kept = achieved >= SUSTAINED_SHARE * min(rate, offered) and self._is_met(served)
        self.rates.append({"request_rate": rate, "kept": kept} | served.figures)
        return kept

    async def is_kept_unloaded(self) -> bool:
        """Whether enough requests meet the SLO when they are sent one at a time."""
        num_requests = min(UNLOADED_REQUESTS, self.config.workload.num_requests)
        arrivals = ArrivalConfig(concurrency=1)
        served = await self._measure("one at a time", num_requests, arrivals)
        self.unloaded = served.figures
        return self._is_met(served)

    async def _measure(self, title: str, num_requests: int, arrivals: ArrivalConfig) -> ServedRun:
        workload = replace(self.config.workload, num_requests=num_requests)
        plan = replace(self.config.plan, workload=workload, arrivals=arrivals)
        served = await _run_with_bar(self.target, plan, title)
        _print_failures(served)
        self.num_failed += served.num_failed
        return served

    def _is_met(self, served: ServedRun) -> bool:
        share = served.figures.get("good_share", 0.0)
        return share >= self.config.capacity.slo_share


def _process(config: ServeConfig) -> str:
    """The arrivals of every rate, in words."""
    burstiness = config.arrivals.burstiness
    return f"open loop, {process_in_words(1.0 if burstiness is None else burstiness)}"


def _verdict(capacity: Capacity, unloaded: Figures) -> str:
    if capacity.too_high == 0:
        return f"capacity: none; the SLO isn't met without any load either. {_latencies(unloaded)}"
    if capacity.rate == 0:
        return f"capacity: below {capacity.too_high:.3g} requests/s, the lowest rate tried"
    if math.isinf(capacity.too_high):
        return f"capacity: above {capacity.rate:.3g} requests/s, the highest rate tried"
    return (
        f"capacity: {capacity.rate:.3g} requests/s; {capacity.too_high:.3g} requests/s is not "
        "achieved, or too few meet the SLO at it"
    )


def _latencies(unloaded: Figures) -> str:
    """What the requests that were sent one at a time took."""
    count = unloaded["requests_completed"]
    if not count:
        return "No request completed when sent alone"
    latencies = (
        f"{name} {statistic} {unloaded[key]:.4g} ms"
        for name in ("ttft", "tpot", "e2e")
        for statistic in ("p50", "p90")
        if (key := f"{name}_{statistic}_ms") in unloaded
    )
    return (
        f"Of {count} requests sent one at a time {unloaded['good_share']:.3g} met it: "
        + ", ".join(latencies)
    )


def _finite(value: float) -> float | None:
    return None if math.isinf(value) else value


def _slo_in_words(config: ServeConfig) -> str:
    limits = [
        f"{name} <= {limit:g} s"
        for name in ("ttft", "tpot", "e2e")
        if (limit := getattr(config.slo, name)) is not None
    ]
    return f"{config.capacity.slo_share:.3g} of the requests with {' and '.join(limits)}"


def _probe_table(probes: Sequence[Figures]) -> Table:
    columns = {
        "request_rate": "requests/s",
        "requests_per_second": "achieved",
        "requests_completed": "completed",
        "good_share": "share that met the SLO",
        "ttft_p90_ms": "ttft p90 ms",
        "tpot_p90_ms": "tpot p90 ms",
    }
    table = Table(title="Rates in the order tried", title_justify="left")
    for title in (*columns.values(), "kept"):
        table.add_column(title, justify="right")
    for probe in probes:
        figures = (f"{probe[name]:,.4g}" if name in probe else "-" for name in columns)
        table.add_row(*figures, "yes" if probe["kept"] else "no")
    return table


def _facts(target: Target) -> dict[str, str]:
    form = "token ids" if target.prompt_form == "tokens" else "text"
    return {
        "server": f"{target.config.base_url}, {target.path}",
        "model": target.model,
        "prompts": form,
    }


def _print_facts(facts: Mapping[str, str]) -> None:
    for name, value in facts.items():
        title = f"{name.replace('_', ' ')}:"
        print(f"{title:<14}{value}")


def _print_failures(served: ServedRun) -> None:
    """One line for each kind, with what was said the first time."""
    for kind, count in served.load.failures_by_kind.most_common():
        message = next(f.message for f in served.load.failures if f.kind == kind)
        print(f"{count} x {kind}; the first: {message}", file=sys.stderr)


def _context(config: ServeConfig) -> dict[str, Any]:
    """What was measured with what; the key stays out of it."""
    settings = asdict(config)
    for part in ("workload", "json"):
        del settings[part]
    del settings["target"]["api_key"]
    return {
        "benchmark": "serve",
        "shoal": version("shoal"),
        "machine": asdict(Machine.this()),
        "workload": asdict(config.workload),
        "settings": settings,
    }


async def _run_with_bar(target: Target, plan: Plan, title: str) -> ServedRun:
    with progress_bar(MofNCompleteColumn(), TimeElapsedColumn(), description=title) as update:
        return await run_once(
            target, plan, lambda ended, total: update(completed=ended, total=total)
        )
