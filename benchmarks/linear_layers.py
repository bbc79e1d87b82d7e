"""Measures linear layers alone, against the peaks of this machine.

    python benchmarks/linear_layers.py [--threads N] [--isa NAME]... [--rounds 5] [--json FILE]

The layers are those of SmolLM2-135M in Q4_1. A product of one row is compared with the read
bandwidth, its weights coming from memory; products of many rows with the peak of the unit that
computes them: bf16 tiles on AMX, 8-bit integers elsewhere. Peaks and layers alternate, since others
may slow the machine down meanwhile; the table has the medians over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
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
from roofline import measure as measure_peaks
from roofline import positive
from roofline import program as roofline_program

from shoal._native import kernels
from shoal.bench.results.machine import Machine
from shoal.bench.results.output_path import require_writable

STORAGE_TYPE = "Q4_1"
BLOCK_BYTES, BLOCK_COLUMNS = 20, 32
LAYERS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
WEIGHTS = sum(outputs * inputs for outputs, inputs in LAYERS.values())
ROWS = (1, 8, 32, 64, 128, 512)
COLD_BYTES = 256 << 20  # of weights, larger than the caches
PEAKS = {"amx": "bf16_amx", "avx512": "int8_vnni"}
BANDWIDTH = "read_100_mib"
PEAK_REPETITIONS = 20


@dataclass(frozen=True, slots=True)
class Measured:
    """All layers of one kind in one block of the model for `rows` rows, and peaks just before.

    In billions of multiplications and additions a second, and of bytes of weights, as in the file.
    """

    isa: str
    rows: int
    round: int
    gops: float
    gigabytes: float
    peak_gops: float
    peak_gigabytes: float

    @property
    def of_peak(self) -> float:
        return self.gops / self.peak_gops

    @property
    def of_bandwidth(self) -> float:
        return self.gigabytes / self.peak_gigabytes


def random_weights(outputs: int, inputs: int) -> npt.NDArray[np.uint8]:
    """Blocks of Q4_1 with scales and minimums of ordinary size."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (outputs * inputs // BLOCK_COLUMNS, BLOCK_BYTES), np.uint8)
    blocks[:, :4] = np.array([0.01, -0.08], np.float16).view(np.uint8)
    return blocks.reshape(-1)


def seconds(isa: str, threads: int, rows: int) -> float:
    """The shortest times of the four layers, one after the other."""
    total = 0.0
    for outputs, inputs in LAYERS.values():
        weights = random_weights(outputs, inputs)
        copies = COLD_BYTES // len(weights) if rows == 1 else 1
        total += kernels.time_linear(
            isa, threads, STORAGE_TYPE, weights, outputs, inputs, rows, copies
        )
    return total


def measure(isas: Sequence[str], threads: int, rounds: int) -> list[Measured]:
    measured = []
    with roofline_program() as program:
        for number in range(rounds):
            for isa, rows in itertools.product(isas, ROWS):
                found = measure_peaks(program, [threads], PEAK_REPETITIONS)
                peaks = {peak.name: peak.value for peak in found}
                time = seconds(isa, threads, rows)
                measured.append(
                    Measured(
                        isa,
                        rows,
                        number,
                        gops=2 * rows * WEIGHTS / time / 1e9,
                        gigabytes=WEIGHTS / BLOCK_COLUMNS * BLOCK_BYTES / time / 1e9,
                        peak_gops=peaks[PEAKS[isa]],
                        peak_gigabytes=peaks[BANDWIDTH],
                    )
                )
    return measured


def median_and_range(shares: Sequence[float]) -> str:
    return f"{statistics.median(shares):.0%} ({min(shares):.0%} to {max(shares):.0%})"


def table_of(measured: Sequence[Measured], title: str) -> Table:
    table = Table("set", "rows", "Gop/s", "of the peak", "GB/s", "of the bandwidth", title=title)
    for isa, rows in dict.fromkeys((item.isa, item.rows) for item in measured):
        items = [item for item in measured if (item.isa, item.rows) == (isa, rows)]
        table.add_row(
            isa,
            str(rows),
            f"{statistics.median(item.gops for item in items):.0f}",
            median_and_range([item.of_peak for item in items]),
            f"{statistics.median(item.gigabytes for item in items):.1f}" if rows == 1 else "",
            median_and_range([item.of_bandwidth for item in items]) if rows == 1 else "",
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
    measured = measure(isas, arguments.threads, arguments.rounds)
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
