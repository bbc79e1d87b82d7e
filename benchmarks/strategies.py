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
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.bench.arrivals import gamma_arrivals
from shoal.bench.lengths import ExponentialLengths, LengthRange
from shoal.bench.machine import Machine
from shoal.bench.replay import Replay, ReplayEngine
from shoal.bench.workload import (
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
EXPONENTIAL = Workload(
    num_requests=200, input_len=LengthRange(64, 64), output_len=ExponentialLengths(128, 512)
)
MIXED = Workload(num_requests=96)
UNIFORM = Workload(
    num_requests=64, input_len=LengthRange(128, 128), output_len=LengthRange(128, 128)
)
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
        table.add_row(name, *(f"{figures[name]:,.3f}" for figures in results.values()))
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = open_model(resolve(MODEL, progress=True))
    ordinary = ordinary_token_ids(load_text_interface(model).tokenizer)
    exponential = generate_requests(EXPONENTIAL, ordinary)
    mixed = generate_requests(MIXED, ordinary)
    uniform = generate_requests(UNIFORM, ordinary)

    def offline(title: str, requests: Sequence[WorkloadRequest]) -> dict[str, Figures]:
        return alternate(OFFLINE, title, requests, [0.0] * len(requests), arguments.rounds)

    exponential_figures = offline("exponential", exponential)
    mixed_figures = offline("mixed", mixed)
    uniform_figures = offline("uniform", uniform)
    rate = exponential_figures["static"]["requests/s"] / 2
    arrivals = gamma_arrivals(rate, 1.0, NUM_ONLINE, seed=0)
    online_figures = alternate(ONLINE, "half load", exponential[:NUM_ONLINE], arrivals.times, 1)

    prediction = predicted_utilization(exponential)
    print_table(
        "200 requests, 64 in, exponential out (mean 128, cap 512), all at once", exponential_figures
    )
    print(f"slot utilisation of static, predicted from the lengths: {prediction:.3f}")
    print_table("96 requests, 50-800 in, 20-200 out, all at once", mixed_figures)
    print_table("64 requests, 128 in, 128 out, all at once", uniform_figures)
    print_table(
        f"{NUM_ONLINE} of the first as a Poisson process at {rate:.2f} requests/s", online_figures
    )
    if arguments.json is not None:
        content = {
            "machine": asdict(Machine.this()),
            "rounds": arguments.rounds,
            "exponential": exponential_figures,
            "static_utilisation_predicted": prediction,
            "mixed": mixed_figures,
            "uniform": uniform_figures,
            "half_load": {"rate": rate} | online_figures,
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
