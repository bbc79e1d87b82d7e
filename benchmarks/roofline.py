"""Measures the peaks of this machine: multiply-adds by instruction set, and read bandwidth.

    python benchmarks/roofline.py [--threads N] [--json FILE]

Compiles roofline.cpp for this very CPU with g++ (or $CXX), runs it with one thread and with N, and
prints a table. docs/benchmarking.md says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.bench.results.machine import Machine
from shoal.bench.results.output_path import require_writable

SOURCE = Path(__file__).with_name("roofline.cpp")
FLAGS = ["-O3", "-march=native", "-std=c++20", "-pthread"]
REPETITIONS = 200  # of each short run, of which the best counts


@dataclass(frozen=True, slots=True)
class Peak:
    """What a number of threads did at best; value in `unit` a second."""

    name: str
    threads: int
    value: float
    unit: str


class Roofline:
    """The program that measures, at work."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self._program = program
        self.names: list[str] = json.loads(self._answer())

    def measure(self, name: str, threads: int, repetitions: int = REPETITIONS) -> Peak:
        assert self._program.stdin is not None
        print(name, threads, repetitions, file=self._program.stdin, flush=True)
        return Peak(**json.loads(self._answer()))

    def _answer(self) -> str:
        assert self._program.stdout is not None
        if not (line := self._program.stdout.readline()):
            raise RuntimeError(f"{SOURCE.name} ended with code {self._program.wait()}")
        return line


@contextmanager
def roofline() -> Iterator[Roofline]:
    """Compiles the program for this CPU and starts it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "roofline"
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(path)], check=True)
        pipe = subprocess.PIPE
        with subprocess.Popen([path], stdin=pipe, stdout=pipe, text=True) as program:
            yield Roofline(program)


def positive(text: str) -> int:
    """An argument that must be 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the peaks of this machine.")
    parser.add_argument("--threads", type=positive, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    counts = sorted({1, arguments.threads})
    with roofline() as machine:
        peaks = [machine.measure(name, count) for count in counts for name in machine.names]
    table = Table("peak", "threads", "value", "unit", title=Machine.this().cpu)
    for peak in peaks:
        table.add_row(peak.name, str(peak.threads), f"{peak.value:.1f}", peak.unit)
    Console().print(table)
    if arguments.json is not None:
        content = {"machine": asdict(Machine.this()), "peaks": [asdict(peak) for peak in peaks]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
