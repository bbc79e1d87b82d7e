"""Runs a strategy as users have it: a server of its own, asked over HTTP by the load generator."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvloop

from shoal.bench.client.connection import HttpClient
from shoal.bench.client.load import LoadRun, run_load
from shoal.bench.client.target import TargetConfig, connect
from shoal.bench.errors import BenchError
from shoal.bench.results.measure import Distribution
from shoal.bench.results.report import Figures
from shoal.bench.runs.outcome import Outcome
from shoal.bench.runs.server_process import serving
from shoal.bench.runs.step_trace import read_engine_record
from shoal.bench.workloads.arrivals import ClosedLoop, OpenLoop
from shoal.bench.workloads.workload import WorkloadRequest
from shoal.config import EngineConfig


@dataclass(frozen=True, slots=True)
class ServedRunner:
    """The `Runner` that starts a server for each run; `warm_up` is sent before the measured ones.

    What no client sees comes from the server's step trace. Its times and those of the load
    generator are of one clock, for both processes are on one machine.
    """

    warm_up: Sequence[WorkloadRequest]

    def __call__(
        self, config: EngineConfig, requests: Sequence[WorkloadRequest], times: Sequence[float]
    ) -> Outcome:
        """Make one run.

        Raises:
            BenchError: the server doesn't start or doesn't answer, or its trace can't be read.
        """
        with tempfile.TemporaryDirectory(prefix="shoal-compare-") as directory:
            trace = Path(directory) / "trace.json"
            traced = dataclasses.replace(config, trace_file=str(trace))
            with serving(traced, Path(directory)) as url:
                load = uvloop.run(self._drive(url, requests, times))
            engine = read_engine_record(trace, load.start)
        return Outcome(
            timelines=load.timelines,
            failures=load.failures,
            engine=engine,
            extra=_generator_figures(load),
            start=min(record.scheduled for record in load.records),
        )

    async def _drive(
        self, url: str, requests: Sequence[WorkloadRequest], times: Sequence[float]
    ) -> LoadRun:
        async with HttpClient(url, None) as client:
            target = await connect(client, TargetConfig(base_url=url))
            warm_up = await run_load(target, self.warm_up, ClosedLoop(len(self.warm_up)))
            if warm_up.failures:
                failure = warm_up.failures[0]
                raise BenchError(f"the warm-up failed: {failure.kind}, {failure.message}")
            await target.reset_prefix_cache()
            return await run_load(target, requests, OpenLoop(tuple(times), "open loop"))


def _generator_figures(load: LoadRun) -> Figures:
    """What the load generator itself used and lost."""
    figures: Figures = {"load_generator_cpu_share": load.cpu_share}
    if (delays := Distribution.of(load.send_delays)) is not None:
        figures["send_delay_p99_ms"] = delays.p99 * 1e3
    return figures
