"""Measures the time of one step of the executor against its rows and their context.

    python benchmarks/profile_step.py [--threads N] [--rounds N] [--json FILE]

A step of decoding has a row for each of several sequences, one of prefill a chunk of a sequence.
The shapes take turns, so that a slow moment of the machine hits all; the table has medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shoal.bench.results.machine import Machine
from shoal.config import BLOCK_SIZE
from shoal.executor.native import NativeExecutor
from shoal.model.loader import open_model
from shoal.model.registry import resolve
from shoal.request import Request, SamplingParams
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep

KV_CACHE_BYTES = 1 << 31
LONGEST_CONTEXT = 8192
CONTEXTS = (100, 500, 4000)
DECODE_ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
PREFILL_ROWS = (32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step computes: `chunk` tokens of each of `sequences`, after `context` tokens."""

    sequences: int
    chunk: int
    context: int

    def step(self, num_blocks: int) -> ScheduledStep:
        """The step; sequences share blocks when the pool has too few, which costs the same."""
        blocks_each = -(-(self.context + self.chunk) // BLOCK_SIZE)
        requests = []
        for index in range(self.sequences):
            first = index * blocks_each
            blocks = [(first + place) % num_blocks for place in range(blocks_each)]
            tokens = [1000 + (index + 37 * place) % 30000 for place in range(self.chunk)]
            name = f"{self.sequences}x{self.chunk}@{self.context}-{index}"
            request = Request(name, tokens, SamplingParams(temperature=0), max_tokens=1, seed=0)
            requests.append(ScheduledRequest(request, tokens, self.context, blocks, sample=True))
        return ScheduledStep(0, requests)


def measure(executor: NativeExecutor, shapes: list[Shape], rounds: int) -> dict[Shape, list[float]]:
    """Seconds of each step, `rounds` of each shape."""
    steps = {shape: shape.step(executor.num_blocks) for shape in shapes}
    seconds: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for round_index in range(rounds + 1):  # the first warms up
        for shape, step in steps.items():
            start = time.perf_counter()
            executor.execute(step)
            if round_index > 0:
                seconds[shape].append(time.perf_counter() - start)
    return seconds


def table(title: str, shapes: list[Shape], seconds: dict[Shape, list[float]]) -> Table:
    """A line for each number of rows, a column for each context."""
    contexts = sorted({shape.context for shape in shapes})
    result = Table(
        "rows", *(f"after {context}" for context in contexts), title=f"{title}, ms a step"
    )
    for rows in sorted({shape.sequences * shape.chunk for shape in shapes}):
        cells = [
            f"{1e3 * statistics.median(seconds[shape]):.2f}"
            for shape in sorted(shapes, key=lambda shape: shape.context)
            if shape.sequences * shape.chunk == rows
        ]
        result.add_row(str(rows), *cells)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the time of one step.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = open_model(resolve(arguments.model))
    executor = NativeExecutor(
        model.record_program(LONGEST_CONTEXT),
        kv_cache_bytes=KV_CACHE_BYTES,
        num_valid_tokens=model.num_tokens,
        num_threads=arguments.threads,
    )
    decode = [Shape(rows, 1, context) for rows in DECODE_ROWS for context in CONTEXTS]
    prefill = [Shape(1, rows, context) for rows in PREFILL_ROWS for context in (0, *CONTEXTS)]
    seconds = measure(executor, decode + prefill, arguments.rounds)
    executor.close()
    console = Console()
    machine = Machine.this()
    console.print(f"{machine.cpu}, {arguments.threads} threads, {executor.isa}")
    console.print(table("decode", decode, seconds))
    console.print(table("prefill", prefill, seconds))
    if arguments.json is not None:
        steps = [asdict(shape) | {"seconds": seconds[shape]} for shape in decode + prefill]
        content = {"machine": asdict(machine), "threads": arguments.threads, "steps": steps}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
