"""Draws docs/images/strategies.png: the same requests under each strategy, from a real run.

    python benchmarks/draw_strategies.py [--output FILE]

Twelve requests with answers of very different lengths arrive within two seconds at four slots.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from shoal.bench.comparison.timeline import draw_timeline, legend_entries
from shoal.bench.runs.replay import Replay, ReplayEngine
from shoal.config import EngineConfig

PICTURE = Path(__file__).parent.parent / "docs" / "images" / "strategies.png"
PROMPT_TOKENS = (400, 250, 120, 500, 200, 300, 150, 420, 100, 350, 220, 180)
OUTPUT_TOKENS = (120, 20, 45, 30, 150, 25, 60, 15, 40, 110, 20, 35)
ARRIVALS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.5, 2.0)
STRATEGIES: dict[str, dict[str, Any]] = {
    "static: a batch lasts as long as its longest answer": {"scheduler": "static"},
    "dynamic: a batch may start before it is full, and lasts as long": {
        "scheduler": "dynamic",
        "max_queue_delay": 0.02,
    },
    "continuous: a slot is filled again in the next step": {"scheduler": "continuous"},
}


def replay(settings: dict[str, Any]) -> Replay:
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 40000) for _ in range(length)] for length in PROMPT_TOKENS]
    engine = ReplayEngine(EngineConfig(max_num_seqs=4, **settings))
    try:
        return engine.run(prompts, OUTPUT_TOKENS, ARRIVALS)
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws the same requests under each strategy.")
    parser.add_argument("--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    replays = {title: replay(settings) for title, settings in STRATEGIES.items()}
    figure, rows = plt.subplots(
        len(replays), 1, sharex=True, figsize=(12, 6.5), layout="constrained"
    )
    for axes, (title, result) in zip(rows, replays.items(), strict=True):
        end = max(timeline.last_token for timeline in result.timelines)
        share = f"{result.stats.slot_utilization:.0%} of the slots used, done after {end:.1f} s"
        draw_timeline(axes, result.steps, f"{title} ({share})", names=True)
    rows[-1].set_xlim(0, max(result.steps[-1].end for result in replays.values()))
    rows[-1].set_xlabel("seconds")
    figure.legend(handles=legend_entries(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(arguments.output, dpi=100)


if __name__ == "__main__":
    main()
