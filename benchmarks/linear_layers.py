"""Measures linear layers alone, against the peaks of this machine.

    python benchmarks/linear_layers.py [--threads N] [--isa NAME]... [--rounds 5] [--json FILE]

The layers are those of SmolLM2-135M in Q4_1, the gates applied as in the model. A product of one
row is compared with the read bandwidth, its weights coming from memory; products of many rows with
the peak of the unit that computes them: bf16 tiles on AMX, 8-bit integers elsewhere.

Others may slow the machine down meanwhile, so a slice of each layer follows right after a look at
the peak, in turn, many times: the share of a turn is what its products would take at the peaks
beside them over what they took. A round has the median over its turns, the table over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from roofline import Roofline, positive, roofline

from shoal._native import kernels
from shoal.bench.results.machine import Machine
from shoal.bench.results.output_path import require_writable

STORAGE_TYPE = "Q4_1"
BLOCK_BYTES, BLOCK_COLUMNS = 20, 32
LAYERS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 8, 32, 64, 128, 512)
COLD_BYTES = 256 << 20  # of each of the four layers
PEAKS = {"amx": "bf16_amx", "avx512": "int8_vnni"}
BANDWIDTH = "read_1_gib"
TURNS = 20
SLICE_SECONDS = 0.01
PEAK_REPETITIONS = 3  # a few milliseconds; of the bandwidth a tenth of a second


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of all layers of one kind in one block of the model, for `rows` rows.

    In billions a second of multiplications and additions, or of bytes of weights as in the file
    where `rows` is 1: medians over the turns of what was done, of the peak, and of their quotient.
    """

    isa: str
    rows: int
    round: int
    done: float
    peak: float
    share: float


def random_weights(outputs: int, inputs: int) -> npt.NDArray[np.uint8]:
    """Blocks of Q4_1 with scales and minimums of ordinary size."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (outputs * inputs // BLOCK_COLUMNS, BLOCK_BYTES), np.uint8)
    blocks[:, :4] = np.array([0.01, -0.08], np.float16).view(np.uint8)
    return blocks.reshape(-1)


def timed_layer(isa: str, threads: int, rows: int, name: str) -> kernels.TimedLinear:
    outputs, inputs = LAYERS[name]
    weights = random_weights(outputs, inputs)
    copies = COLD_BYTES // len(weights) if rows == 1 else 1
    return kernels.TimedLinear(
        isa, threads, STORAGE_TYPE, weights, outputs, inputs, rows, copies, gated=name == "gate_up"
    )


def measure_round(machine: Roofline, isa: str, threads: int, rows: int, number: int) -> Measured:
    name = BANDWIDTH if rows == 1 else PEAKS[isa]
    per_weight = BLOCK_BYTES / BLOCK_COLUMNS if rows == 1 else 2 * rows
    layers = [timed_layer(isa, threads, rows, layer) for layer in LAYERS]
    work = [per_weight * outputs * inputs / 1e9 for outputs, inputs in LAYERS.values()]
    done, peaks, shares = [], [], []
    for _ in range(TURNS):
        taken = at_peak = 0.0
        for layer, amount in zip(layers, work, strict=True):
            at_peak += amount / machine.measure(name, threads, PEAK_REPETITIONS).value
            taken += layer.time(SLICE_SECONDS)
        done.append(sum(work) / taken)
        peaks.append(sum(work) / at_peak)
        shares.append(at_peak / taken)
    medians = map(statistics.median, (done, peaks, shares))
    return Measured(isa, rows, number, *medians)


def median_and_range(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"


def table_of(measured: Sequence[Measured], title: str) -> Table:
    table = Table("set", "rows", "done", "at the peak", "unit", "share (rounds)", title=title)
    for isa, rows in dict.fromkeys((item.isa, item.rows) for item in measured):
        items = [item for item in measured if (item.isa, item.rows) == (isa, rows)]
        table.add_row(
            isa,
            str(rows),
            f"{statistics.median(item.done for item in items):.1f}",
            f"{statistics.median(item.peak for item in items):.1f}",
            "GB/s" if rows == 1 else "Gop/s",
            median_and_range([item.share for item in items]),
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures linear layers against the peaks.")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", action="append", choices=sorted(PEAKS))
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    isas = arguments.isa or [isa for isa in PEAKS if isa in kernels.instruction_sets()]
    if not isas:
        parser.error(f"this processor has none of {', '.join(PEAKS)}")
    with roofline() as machine:
        measured = [
            measure_round(machine, isa, arguments.threads, rows, number)
            for number in range(arguments.rounds)
            for isa in isas
            for rows in ROWS
        ]
    title = f"{Machine.this().cpu}, {arguments.threads} threads, {arguments.rounds} rounds"
    Console().print(table_of(measured, title))
    if arguments.json is not None:
        content = {
            "machine": asdict(Machine.this()),
            "threads": arguments.threads,
            "measured": [asdict(item) for item in measured],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
