"""One measured run against a server: warm-up, a forgotten prefix cache, the load, the figures."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from cyclopts import Parameter

from shoal.bench.client.load import REFUSED, LoadRun, OnEnd, run_load
from shoal.bench.client.target import Target
from shoal.bench.errors import BenchError
from shoal.bench.results.measure import Distribution, Measurement, Slo, measure
from shoal.bench.results.report import Figures, figures_of
from shoal.bench.workloads.arrivals import ArrivalConfig, Arrivals, ClosedLoop, OpenLoop
from shoal.bench.workloads.workload import Workload, generate_requests
from shoal.config import ConfigError

WARM_UP_OUTPUT_TOKENS = 16


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationConfig:
    """What happens before the first measured request.

    Raises:
        ConfigError: a value is outside its range.
    """

    warm_up_requests: int = 4
    """Requests sent before the measured ones; they are in no figure."""

    reuse_prompts: bool = False
    """Send the prompts of any other run with this seed, and leave the prefix cache as it is. By
    default each run has prompts of its own and the cache is reset after the warm-up."""

    def __post_init__(self) -> None:
        if self.warm_up_requests < 0:
            raise ConfigError(f"warm_up_requests must be 0 or more, got {self.warm_up_requests}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run asks, when, and what counts as a good answer."""

    workload: Workload
    arrivals: ArrivalConfig
    slo: Slo
    preparation: PreparationConfig


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A run and its figures; `measurement` is None if no request completed.

    `prefix_cache` says in words whether the server can have seen the prompts before.
    """

    load: LoadRun
    arrivals: Arrivals
    measurement: Measurement | None
    num_cut: int
    prefix_cache: str

    @property
    def num_failed(self) -> int:
        """Requests that failed, without those that were refused."""
        return len(self.load.failures) - self.load.failures_by_kind[REFUSED]

    @property
    def figures(self) -> Figures:
        """The figures by name."""
        if self.measurement is not None:
            figures = figures_of(self.measurement)
        else:
            figures = {
                "requests_completed": 0,
                "requests_failed": self.num_failed,
                "requests_refused": self.load.failures_by_kind[REFUSED],
            }
        if isinstance(self.arrivals, OpenLoop) and self.arrivals.offered_rate is not None:
            figures["offered_requests_per_second"] = self.arrivals.offered_rate
        figures["requests_in_flight_mean"] = self.load.mean_in_flight
        figures["requests_in_flight_max"] = self.load.max_in_flight
        if (delays := Distribution.of(self.load.send_delays)) is not None:
            figures["send_delay_p99_ms"] = delays.p99 * 1e3
        figures["requests_cut"] = self.num_cut
        figures["requests_without_usage"] = self.load.num_uncounted
        figures["load_generator_cpu_share"] = self.load.cpu_share
        return figures


async def run_once(target: Target, plan: Plan, on_end: OnEnd | None = None) -> ServedRun:
    """Warm the server up, and measure it; `on_end` is called as `run_load` says.

    Raises:
        BenchError: no warm-up request was answered, or the server can't be reached any more.
        WorkloadError: the trace or the dataset can't be understood.
        ArrivalError: the trace tells no arrivals and nothing else says when to send.
    """
    workload, preparation = plan.workload, plan.preparation
    salt = "" if preparation.reuse_prompts else secrets.token_hex(8)
    requests = generate_requests(workload, target.vocabulary, salt)
    times = plan.arrivals.arrivals(requests, workload.seed)
    await _warm_up(target, workload, preparation.warm_up_requests)
    if preparation.reuse_prompts:
        prefix_cache = "warm if these prompts were sent before: prompts reused, cache not reset"
    else:
        prefix_cache = f"cold: fresh prompts, cache {await target.reset_prefix_cache()}"
    load = await run_load(target, requests, times, on_end=on_end)
    return ServedRun(
        load=load,
        arrivals=times,
        measurement=_measurement(load, plan.slo),
        num_cut=sum(request.cut for request in requests),
        prefix_cache=prefix_cache,
    )


async def _warm_up(target: Target, workload: Workload, num_requests: int) -> None:
    """Send short answers' worth of the workload, all at once, with prompts of its own."""
    if num_requests == 0:
        return
    shapes = replace(workload, num_requests=num_requests)
    requests = [
        replace(request, max_tokens=min(request.max_tokens, WARM_UP_OUTPUT_TOKENS))
        for request in generate_requests(shapes, target.vocabulary, secrets.token_hex(8))
    ]
    load = await run_load(target, requests, ClosedLoop(num_requests))
    if not load.timelines:
        failure = load.failures[0]
        raise BenchError(f"no warm-up request was answered: {failure.kind}, {failure.message}")


def _measurement(load: LoadRun, slo: Slo) -> Measurement | None:
    timelines = load.timelines
    if not timelines:
        return None
    num_refused = load.failures_by_kind[REFUSED]
    return measure(
        timelines,
        len(load.failures) - num_refused,
        num_refused=num_refused,
        slo=slo,
        start=min(record.scheduled for record in load.records),
    )
