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
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.bench.results.machine import Machine

SOURCE = Path(__file__).with_name("roofline.cpp")
FLAGS = ["-O3", "-march=native", "-std=c++20", "-pthread"]


def measure(threads: int) -> list[dict[str, object]]:
    """Compile and run; each item has name, threads, value and unit."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "roofline"
        compiler = os.environ.get("CXX", "g++")
        subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(program)], check=True)
        done = subprocess.run(
            [str(program), str(threads)], check=True, stdout=subprocess.PIPE, text=True
        )
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the peaks of this machine.")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    peaks = measure(arguments.threads)
    table = Table("peak", "threads", "value", "unit", title=Machine.this().cpu)
    for peak in peaks:
        table.add_row(*(str(peak[name]) for name in ("name", "threads", "value", "unit")))
    Console().print(table)
    if arguments.json is not None:
        content = {"machine": asdict(Machine.this()), "peaks": peaks}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
