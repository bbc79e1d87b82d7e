"""Measures a decode step of one request against the read bandwidth of this machine.

    python benchmarks/one_row.py [--model NAME] [--threads N] [--rounds 5] [--json FILE]

Such a step reads every weight once and does little with it, so the bandwidth is its limit. The
whole step counts, from what the scheduler hands over to the sampled token, but of what it reads the
weights alone, as many bytes as the file has of them (an embedding that isn't the output layer's
counts too, though a step reads a row of it: don't compare such models). Steps and looks at the
bandwidth take turns; the share of a turn is what its steps read a second over the peaks beside it:
of 1 GiB, of which caches hold next to nothing, and of 100 MiB, about as much as the demo model has,
read again and again as a decode does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from profile_step import KV_CACHE_BYTES, LONGEST_CONTEXT, Shape
from rich.console import Console
from rich.table import Table
from roofline import Roofline, positive, roofline

from shoal.bench.results.machine import Machine
from shoal.bench.results.output_path import require_writable
from shoal.executor.native import NativeExecutor
from shoal.model.loader import open_model
from shoal.model.registry import resolve

PEAKS = ("read_1_gib", "read_100_mib")
CONTEXT = 160
TURNS = 20
STEPS = 30  # of a turn, about a tenth of a second
PEAK_REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Measured:
    """One round: medians over its turns, in GB/s; `shares` are of the peaks of the same turn."""

    round: int
    done: float
    peaks: dict[str, float]
    shares: dict[str, float]


class Decode:
    """Steps of one request, from the weights of one model."""

    def __init__(self, name: str, threads: int) -> None:
        model = open_model(resolve(name))
        program = model.record_program(LONGEST_CONTEXT)
        self.weight_bytes = sum(weight.data.nbytes for weight in program.weights.values())
        self.executor = NativeExecutor(
            program,
            kv_cache_bytes=KV_CACHE_BYTES,
            num_valid_tokens=model.num_tokens,
            num_threads=threads,
        )
        self._step = Shape(1, 1, CONTEXT).step(self.executor.num_blocks)

    def bandwidth(self) -> float:
        """GB of weights a second, over STEPS steps."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.executor.execute(self._step)
        return STEPS * self.weight_bytes / (time.perf_counter() - start) / 1e9


def measure_round(machine: Roofline, decode: Decode, threads: int, number: int) -> Measured:
    done: list[float] = []
    peaks: dict[str, list[float]] = {name: [] for name in PEAKS}
    for _ in range(TURNS):
        for name in PEAKS:
            peaks[name].append(machine.measure(name, threads, PEAK_REPETITIONS).value)
        done.append(decode.bandwidth())
    shares = {
        name: statistics.median(mine / peak for mine, peak in zip(done, peaks[name], strict=True))
        for name in PEAKS
    }
    medians = {name: statistics.median(values) for name, values in peaks.items()}
    return Measured(number, statistics.median(done), medians, shares)


def table_of(measured: list[Measured], title: str) -> Table:
    table = Table("read", "GB/s", "share of it (rounds)", title=title)
    table.add_row("weights, by decoding", f"{statistics.median(m.done for m in measured):.1f}", "")
    for name in PEAKS:
        shares = [m.shares[name] for m in measured]
        table.add_row(
            name,
            f"{statistics.median(m.peaks[name] for m in measured):.1f}",
            f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})",
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures a step of one row against memory.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    decode = Decode(arguments.model, arguments.threads)
    with roofline() as machine:
        measured = [
            measure_round(machine, decode, arguments.threads, number)
            for number in range(arguments.rounds)
        ]
    isa = decode.executor.isa
    decode.executor.close()
    title = f"{Machine.this().cpu}, {arguments.threads} threads, {isa}, {arguments.model}"
    Console().print(table_of(measured, title))
    if arguments.json is not None:
        content = {
            "machine": asdict(Machine.this()),
            "threads": arguments.threads,
            "isa": isa,
            "weight_bytes": decode.weight_bytes,
            "measured": [asdict(item) for item in measured],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
