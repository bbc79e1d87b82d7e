"""What a batching strategy is worth: static, dynamic and continuous on the same requests.

    python benchmarks/strategies.py --rounds 3 --json FILE

Offline, all requests are there at the start: 200 with exponential outputs, where static batches
wait longest, 96 mixed ones, and 64 of equal length. Online, they come as a Poisson process at half
of what static batching can do at most. The strategies alternate within each round; figures are
medians.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.bench.results.machine import Machine
from shoal.bench.runs.replay import Replay, ReplayEngine
from shoal.bench.workloads.arrivals import gamma_arrivals
from shoal.bench.workloads.lengths import ExponentialLengths, LengthRange
from shoal.bench.workloads.workload import (
    Workload,
    WorkloadRequest,
    generate_requests,
    ordinary_token_ids,
)
from shoal.config import EngineConfig
from shoal.engine.loading import load_text_interface
from shoal.model.loader import open_model
from shoal.model.registry import resolve

MAX_NUM_SEQS = 32
MODEL = "smollm2-135m"
STRATEGIES: dict[str, dict[str, Any]] = {
    "static": {"scheduler": "static"},
    "static, padding skipped": {"scheduler": "static", "skip_padding": True},
    "dynamic": {"scheduler": "dynamic"},
    "continuous": {"scheduler": "continuous"},
}
OFFLINE = ("static", "static, padding skipped", "continuous")  # all there: dynamic is static
ONLINE = ("static", "dynamic", "continuous")
WORKLOADS = {
    "exponential": Workload(
        num_requests=200, input_len=LengthRange(64, 64), output_len=ExponentialLengths(128, 512)
    ),
    "mixed": Workload(num_requests=96),  # 50-800 in, 20-200 out
    "uniform": Workload(
        num_requests=64, input_len=LengthRange(128, 128), output_len=LengthRange(128, 128)
    ),
}
CASES = (*WORKLOADS, "half-load")
NUM_ONLINE = 100

Figures = dict[str, float]


def config_of(strategy: str) -> EngineConfig:
    return EngineConfig(
        model=MODEL,
        max_num_seqs=MAX_NUM_SEQS,
        kv_cache_memory_mib=2048,  # a whole static batch fits at its longest
        **STRATEGIES[strategy],
    )


def run(strategy: str, requests: Sequence[WorkloadRequest], times: Sequence[float]) -> Figures:
    engine = ReplayEngine(config_of(strategy))
    try:
        replay = engine.run(
            [request.prompt_token_ids for request in requests],
            [request.max_tokens for request in requests],
            times,
        )
    finally:
        engine.close()
    return figures_of(replay)


def figures_of(replay: Replay) -> Figures:
    timelines = replay.timelines
    duration = max(t.last_token for t in timelines) - min(t.sent for t in timelines)
    queued = [step for step in replay.steps if step.num_waiting > 0]
    figures: Figures = {
        "failed": replay.num_failed,
        "requests/s": len(timelines) / duration,
        "output tokens/s": sum(t.num_output_tokens for t in timelines) / duration,
        "slot utilisation": replay.stats.slot_utilization,
        "mean e2e (s)": fmean(t.e2e for t in timelines),
        "mean queueing (s)": fmean(replay.queue_times),
        "mean ttft (s)": fmean(t.ttft for t in timelines),
        "steps": len(replay.steps),
    }
    if queued:
        figures["slot utilisation while any wait"] = sum(s.num_useful_slots for s in queued) / sum(
            s.num_slots for s in queued
        )
    return figures


def predicted_utilization(requests: Sequence[WorkloadRequest]) -> float:
    """Of static batching, from the lengths alone: a batch lasts as long as its longest answer.

    Slots that are empty because fewer than a batch are left don't count, as in the measurement.
    """
    lengths = [request.max_tokens for request in requests]
    batches = [lengths[i : i + MAX_NUM_SEQS] for i in range(0, len(lengths), MAX_NUM_SEQS)]
    return sum(lengths) / sum(len(batch) * max(batch) for batch in batches)


def alternate(
    strategies: Sequence[str],
    title: str,
    requests: Sequence[WorkloadRequest],
    times: Sequence[float],
    rounds: int,
) -> dict[str, Figures]:
    """The medians of each strategy; A B C A B C."""
    runs: dict[str, list[Figures]] = {strategy: [] for strategy in strategies}
    for number in range(rounds):
        for strategy, done in runs.items():
            print(f"{title}: round {number + 1} of {rounds}, {strategy}", file=sys.stderr)
            done.append(run(strategy, requests, times))
    return {
        strategy: {name: median(figures[name] for figures in done) for name in done[0]}
        for strategy, done in runs.items()
    }


def print_table(title: str, results: dict[str, Figures]) -> None:
    table = Table("", *results, title=title, title_justify="left")
    for name in next(iter(results.values())):
        cells = (f"{figures[name]:,.3f}" if name in figures else "" for figures in results.values())
        table.add_row(name, *cells)
    Console(width=120).print(table)


@dataclass
class Benchmark:
    """The cases, and what has come out so far; written to a file after each."""

    rounds: int
    rate: float | None  # of the half load; half of static's throughput when None
    json: Path | None
    results: dict[str, Any] = field(default_factory=dict)

    def offline(self, name: str, requests: Sequence[WorkloadRequest]) -> None:
        figures = alternate(OFFLINE, name, requests, [0.0] * len(requests), self.rounds)
        self._keep(name, figures, {"static utilisation predicted": predicted_utilization(requests)})

    def half_load(self, requests: Sequence[WorkloadRequest]) -> None:
        """The first requests as a Poisson process at half of static's offline throughput."""
        rate = self.rate or self.results["exponential"]["static"]["requests/s"] / 2
        arrivals = gamma_arrivals(rate, 1.0, NUM_ONLINE, seed=0)
        figures = alternate(ONLINE, "half load", requests[:NUM_ONLINE], arrivals.times, 1)
        self._keep("half-load", figures, {"rate": rate})

    def _keep(self, name: str, figures: dict[str, Figures], facts: Figures) -> None:
        self.results[name] = figures | {"facts": facts}
        print_table(name, figures)
        print(facts)
        if self.json is not None:
            content = {"machine": asdict(Machine.this()), "rounds": self.rounds} | self.results
            self.json.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rate", type=float, help="of half-load, in requests a second")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    knows_rate = "exponential" in arguments.cases or arguments.rate is not None
    if "half-load" in arguments.cases and not knows_rate:
        parser.error("half-load needs the case exponential before it, or --rate")
    model = open_model(resolve(MODEL, progress=True))
    ordinary = ordinary_token_ids(load_text_interface(model).tokenizer)
    benchmark = Benchmark(arguments.rounds, arguments.rate, arguments.json)
    for name in arguments.cases:
        if name == "half-load":
            benchmark.half_load(generate_requests(WORKLOADS["exponential"], ordinary))
        else:
            benchmark.offline(name, generate_requests(WORKLOADS[name], ordinary))


if __name__ == "__main__":
    main()
