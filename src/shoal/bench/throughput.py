"""`shoal bench throughput`: the engine in this process, all requests handed over at once.

Nothing but the engine is measured: no HTTP, no process boundary. All requests are sent at the
start, so that the times to first token include waiting for a free slot. Of a trace the lengths
count, not the arrivals.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from shoal.bench.results.machine import Machine
from shoal.bench.results.measure import RequestTimeline, measure
from shoal.bench.results.output_path import require_writable
from shoal.bench.results.report import Figures, figures_of, print_table, write_json
from shoal.bench.workloads.workload import (
    LengthRange,
    Workload,
    WorkloadRequest,
    generate_requests,
    ordinary_token_ids,
)
from shoal.config import EngineConfig
from shoal.engine.messages import EngineInfo
from shoal.llm import LLM, GenerationOutput
from shoal.request import SamplingParams

_WARM_UP = Workload(num_requests=4, input_len=LengthRange(128, 128), output_len=LengthRange(8, 8))


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputConfig:
    """Settings of `shoal bench throughput`."""

    workload: Workload = field(default_factory=Workload)
    """What is asked."""

    engine: Annotated[EngineConfig, Parameter(name="*")] = field(default_factory=EngineConfig)
    """The engine that answers."""

    json: Path | None = None
    """File to write the result to, with machine, versions and settings."""


_DEFAULTS = ThroughputConfig()


def run(config: Annotated[ThroughputConfig, Parameter(name="*")] = _DEFAULTS) -> int:
    """Measure and print; returns the exit status, 1 when a request failed.

    Raises:
        ConfigError, ModelError: the engine can't be built, or `json` can't be written.
        WorkloadError: the model's vocabulary has no ordinary tokens.
    """
    if config.json is not None:
        require_writable("json", config.json)
    with LLM(**asdict(config.engine)) as llm:
        ordinary = ordinary_token_ids(llm.tokenizer)
        _generate(llm, generate_requests(_WARM_UP, ordinary))
        requests = generate_requests(config.workload, ordinary)
        outputs = _generate(llm, requests, progress=sys.stderr.isatty())
        info = llm.info
    failures = [output.error for output in outputs if output.error is not None]
    if failures:
        print(f"{len(failures)} requests failed; the first: {failures[0]}", file=sys.stderr)
    timelines = _timelines(outputs)
    if not timelines:
        return 1
    figures = figures_of(measure(timelines, len(failures)))
    figures["preemptions"] = sum(
        output.metrics.num_preemptions for output in outputs if output.metrics is not None
    )
    figures["requests_cut"] = sum(request.cut for request in requests)
    print_table(f"{info.model}, {info.num_threads} threads, {info.isa}", figures)
    if config.json is not None:
        write_json(config.json, _result(config, info, figures))
    return 1 if failures else 0


def _generate(
    llm: LLM, requests: Sequence[WorkloadRequest], *, progress: bool = False
) -> list[GenerationOutput]:
    """Generate greedily, each answer exactly as long as its request says."""
    return llm.generate(
        [request.prompt for request in requests],
        [
            SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True)
            for request in requests
        ],
        progress=progress,
    )


def _timelines(outputs: Sequence[GenerationOutput]) -> list[RequestTimeline]:
    """The completed requests; all were sent at time 0, from which the engine's times count."""
    timelines = []
    for output in outputs:
        metrics = output.metrics
        if output.error is None and metrics is not None and metrics.ttft is not None:
            timelines.append(
                RequestTimeline(
                    sent=0.0,
                    first_token=metrics.ttft,
                    last_token=metrics.e2e_time,
                    num_input_tokens=len(output.prompt_token_ids),
                    num_output_tokens=len(output.token_ids),
                    num_cached_tokens=output.num_cached_tokens,
                )
            )
    return timelines


def _result(config: ThroughputConfig, info: EngineInfo, figures: Figures) -> dict[str, Any]:
    return {
        "benchmark": "throughput",
        "shoal": version("shoal"),
        "machine": asdict(Machine.this()),
        "workload": asdict(config.workload),
        "settings": asdict(config.engine),
        "engine": msgspec.structs.asdict(info),
        "figures": figures,
    }
