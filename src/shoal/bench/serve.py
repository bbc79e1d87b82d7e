"""`shoal bench serve`: load on any server with OpenAI's API, and what its users would see."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import uvloop
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from shoal.bench.arrivals import ArrivalConfig
from shoal.bench.capacity import SUSTAINED_SHARE, Capacity, CapacityConfig, find_capacity
from shoal.bench.connection import HttpClient
from shoal.bench.load import OnEnd
from shoal.bench.machine import Machine
from shoal.bench.measure import Slo
from shoal.bench.report import Figures, print_table, write_json
from shoal.bench.served import Plan, PreparationConfig, ServedRun, run_once
from shoal.bench.target import Target, TargetConfig, connect
from shoal.bench.workload import Workload


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
        ConfigError: two settings contradict each other.
        BenchError: the server can't be reached, or isn't one of OpenAI's API.
    """
    return uvloop.run(_run(config if config is not None else ServeConfig()))


async def _run(config: ServeConfig) -> int:
    api_key = config.target.api_key or os.environ.get("SHOAL_API_KEY")
    async with HttpClient(config.target.base_url, api_key) as client:
        target = await connect(client, config.target)
        if config.capacity.find_capacity:
            return await _find_capacity(config, target)
        return await _measure(config, target)


async def _measure(config: ServeConfig, target: Target) -> int:
    with _progress("requests") as on_end:
        served = await run_once(target, config.plan, on_end)
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
    probes: list[Figures] = []
    failed = 0

    async def share_at(rate: float) -> float:
        nonlocal failed
        count = config.capacity.num_requests(rate, config.workload.num_requests)
        plan = replace(
            config.plan,
            workload=replace(config.workload, num_requests=count),
            arrivals=replace(config.arrivals, request_rate=rate),
        )
        with _progress(f"{rate:.3g} requests/s") as on_end:
            served = await run_once(target, plan, on_end)
        _print_failures(served)
        failed += served.num_failed
        measured = served.measurement
        share = 0.0 if measured is None else measured.good_share or 0.0
        if measured is not None and measured.requests_per_second < SUSTAINED_SHARE * rate:
            share = 0.0
        probes.append({"request_rate": rate, "good_share": share} | served.figures)
        return share

    capacity = await find_capacity(
        share_at, config.capacity.slo_share, config.capacity.capacity_precision
    )
    facts = _facts(target) | {"slo": _slo_in_words(config)}
    _print_facts(facts)
    Console().print(_probe_table(probes))
    print(_verdict(capacity))
    if config.json is not None:
        found = {
            "capacity_requests_per_second": capacity.rate,
            "too_high_requests_per_second": _finite(capacity.too_high),
        }
        write_json(
            config.json, _context(config) | {"run": facts, "figures": found, "probes": probes}
        )
    return 1 if failed or capacity.rate == 0 else 0


def _verdict(capacity: Capacity) -> str:
    if capacity.rate == 0:
        return f"capacity: below {capacity.too_high:.3g} requests/s, the lowest rate tried"
    if math.isinf(capacity.too_high):
        return f"capacity: above {capacity.rate:.3g} requests/s, the highest rate tried"
    return (
        f"capacity: {capacity.rate:.3g} requests/s; too few met the SLO "
        f"at {capacity.too_high:.3g} requests/s"
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


def _probe_table(probes: list[Figures]) -> Table:
    columns = {
        "request_rate": "requests/s",
        "requests_completed": "completed",
        "good_share": "share that met the SLO",
        "ttft_p90_ms": "ttft p90 ms",
        "tpot_p90_ms": "tpot p90 ms",
    }
    table = Table(title="Rates in the order tried", title_justify="left")
    for title in columns.values():
        table.add_column(title, justify="right")
    for probe in probes:
        table.add_row(*(f"{probe[name]:,.4g}" if name in probe else "-" for name in columns))
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


@contextmanager
def _progress(title: str) -> Iterator[OnEnd | None]:
    """A progress bar on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        task = progress.add_task(title, total=None)
        yield lambda ended, total: progress.update(task, completed=ended, total=total)
