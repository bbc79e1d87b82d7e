"""Measures linear layers alone, against the peaks of this machine.

    python benchmarks/linear_layers.py [--threads N] [--isa NAME]... [--json FILE]

The layers are those of SmolLM2-135M in Q4_1. A product of one row is compared with the read
bandwidth, its weights coming from memory; products of many rows with the peak of the unit that
computes them: bf16 tiles on AMX, 8-bit integers elsewhere. One run measures peaks and layers.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from roofline import measure as measure_peaks

from shoal._native import kernels
from shoal.bench.results.machine import Machine

STORAGE_TYPE = "Q4_1"
BLOCK_BYTES, BLOCK_COLUMNS = 20, 32
LAYERS = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
ROWS = (1, 8, 16, 32, 64, 128, 512)
COLD_BYTES = 256 << 20  # of weights, larger than the caches
PEAKS = {"amx": "bf16_amx", "avx512": "int8_vnni"}
BANDWIDTH = "read_100_mib"


@dataclass(frozen=True, slots=True)
class Layers:
    """All layers of one kind in one block of the model, for `rows` rows."""

    isa: str
    threads: int
    rows: int
    seconds: float

    @property
    def gops(self) -> float:
        """Billions of multiplications and additions a second."""
        weights = sum(outputs * inputs for outputs, inputs in LAYERS.values())
        return 2 * self.rows * weights / self.seconds / 1e9

    @property
    def gigabytes(self) -> float:
        """Billions of bytes of weights, as in the file, read a second."""
        weights = sum(outputs * inputs for outputs, inputs in LAYERS.values())
        return weights / BLOCK_COLUMNS * BLOCK_BYTES / self.seconds / 1e9


def random_weights(outputs: int, inputs: int) -> npt.NDArray[np.uint8]:
    """Blocks of Q4_1 with scales and minimums of ordinary size."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (outputs * inputs // BLOCK_COLUMNS, BLOCK_BYTES), np.uint8)
    blocks[:, :4] = np.array([0.01, -0.08], np.float16).view(np.uint8)
    return blocks.reshape(-1)


def measure(isa: str, threads: int, rows: int) -> Layers:
    """The time of the four layers, one after the other."""
    seconds = 0.0
    for outputs, inputs in LAYERS.values():
        weights = random_weights(outputs, inputs)
        copies = COLD_BYTES // len(weights) if rows == 1 else 1
        seconds += kernels.time_linear(
            isa, threads, STORAGE_TYPE, weights, outputs, inputs, rows, copies
        )
    return Layers(isa, threads, rows, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures linear layers against the peaks.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", action="append", choices=sorted(PEAKS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    isas = arguments.isa or [isa for isa in PEAKS if isa in kernels.instruction_sets()]
    measured = [measure(isa, arguments.threads, rows) for isa in isas for rows in ROWS]
    peaks = {
        str(peak["name"]): float(str(peak["value"]))
        for peak in measure_peaks(arguments.threads)
        if peak["threads"] == arguments.threads
    }
    table = Table("set", "rows", "Gop/s", "of the peak", "GB/s", "of the bandwidth")
    table.title = f"{Machine.this().cpu}, {arguments.threads} threads"
    for layers in measured:
        gops, gigabytes = layers.gops, layers.gigabytes
        table.add_row(
            layers.isa,
            str(layers.rows),
            f"{gops:.0f}",
            f"{gops / peaks[PEAKS[layers.isa]]:.0%}",
            f"{gigabytes:.1f}" if layers.rows == 1 else "",
            f"{gigabytes / peaks[BANDWIDTH]:.0%}" if layers.rows == 1 else "",
        )
    Console().print(table)
    if arguments.json is not None:
        content = {
            "machine": asdict(Machine.this()),
            "peaks": peaks,
            "layers": [asdict(layers) for layers in measured],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
