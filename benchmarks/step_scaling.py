"""Draws the time of a step against its rows and against their context, and looks for cliffs.

    python benchmarks/step_scaling.py [--threads N] [--rounds N] [--png FILE] [--json FILE]

All sizes take turns in each round; a size's time is its lower quartile, since the machine may be
busy with other things. A cliff is a size that takes far longer than the one before it: a pause that
a user sees when one more request joins.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from profile_step import KV_CACHE_BYTES, LONGEST_CONTEXT, Shape, measure

from shoal.bench.results.machine import Machine
from shoal.executor.native import NativeExecutor
from shoal.model.loader import open_model
from shoal.model.registry import resolve

DECODE_ROWS = (*range(1, 41), 48, 49, 56, 57, 64, 65, 80, 81, 96, 97, 128, 129)
PREFILL_ROWS = (*range(16, 80, 4), *range(80, 544, 16))
CONTEXTS = (*range(16, 800, 16), 1024, 1040, 2048, 2064, 4096, 4112)

SERIES = {
    "decode after 160 tokens: rows": [Shape(rows, 1, 160) for rows in DECODE_ROWS],
    "one prompt: tokens in the step": [Shape(1, rows, 0) for rows in PREFILL_ROWS],
    "decode of 8 rows: context": [Shape(8, 1, context) for context in CONTEXTS],
}


def size(shape: Shape, title: str) -> int:
    """What the series `title` varies."""
    return shape.context if title.endswith("context") else shape.sequences * shape.chunk


def largest_rise(sizes: list[int], seconds: list[float]) -> tuple[float, int]:
    """The largest rise between neighbours beyond the rise in size, and where it is.

    Twice the rows may take twice the time: a rise counts against that of the size.
    """
    rises = []
    for (before, after), (fast, slow) in zip(pairwise(sizes), pairwise(seconds), strict=True):
        rises.append((slow / fast / max(1.0, after / before), after))
    return max(rises)


def draw(axes: Axes, title: str, sizes: list[int], seconds: list[float]) -> None:
    axes.plot(sizes, [1e3 * value for value in seconds], marker=".", linewidth=1)
    axes.set(xlabel=title, ylabel="ms a step", ylim=(0, None), xlim=(0, None))
    axes.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws step time against size.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = open_model(resolve(arguments.model))
    executor = NativeExecutor(
        model.record_program(LONGEST_CONTEXT),
        kv_cache_bytes=KV_CACHE_BYTES,
        num_valid_tokens=model.num_tokens,
        num_threads=arguments.threads,
    )
    shapes = [shape for series in SERIES.values() for shape in series]
    measured = measure(executor, shapes, arguments.rounds)
    executor.close()
    quartile = {shape: statistics.quantiles(times, n=4)[0] for shape, times in measured.items()}
    figure, axes = plt.subplots(1, len(SERIES), figsize=(14, 4), layout="constrained")
    for place, (title, series) in zip(axes, SERIES.items(), strict=True):
        sizes = [size(shape, title) for shape in series]
        seconds = [quartile[shape] for shape in series]
        rise, where = largest_rise(sizes, seconds)
        print(f"{title}: the largest rise beyond the size's is {rise - 1:.1%}, at {where}")
        draw(place, title, sizes, seconds)
    figure.suptitle(f"{Machine.this().cpu}, {arguments.threads} threads, {executor.isa}")
    if arguments.png is not None:
        figure.savefig(arguments.png, dpi=110)
    if arguments.json is not None:
        steps = [asdict(shape) | {"seconds": times} for shape, times in measured.items()]
        content = {"machine": asdict(Machine.this()), "isa": executor.isa, "steps": steps}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
