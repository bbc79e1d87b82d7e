"""The pictures of a comparison, readable at 1200 pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shoal.bench.comparison import Comparison, Run
from shoal.bench.timeline import draw_timeline, legend_entries

WIDTH_INCHES, DPI = 12, 100
MAX_NAMED_SLOTS = 8
STYLES = {"static": ("#d55e00", "s"), "dynamic": ("#009e73", "^"), "continuous": ("#0072b2", "o")}


def draw_all(comparison: Comparison) -> dict[str, bytes]:
    """Every picture as PNG, by its name."""
    pictures = {
        "timeline": _timelines(comparison.highest_load),
        "utilization": _utilization(comparison.highest_load),
        "distributions": _distributions(comparison.highest_load),
    }
    if comparison.loaded:
        pictures["curves"] = _curves(comparison)
    return {name: _png(figure) for name, figure in pictures.items()}


def _timelines(runs: dict[str, Run]) -> Figure:
    """Requests over slots; all strategies on one time axis."""
    num_slots = max(
        max(len(step.rows) for step in run.outcome.engine.steps) for run in runs.values()
    )
    height = 1.2 + len(runs) * min(3.0, 0.8 + 0.2 * num_slots)
    figure = Figure((WIDTH_INCHES, height), DPI, layout="constrained")
    panels = _panels(figure, len(runs), 1, sharex=True)
    for axes, (strategy, run) in zip(panels, runs.items(), strict=True):
        used = f"{run.figures['slot_utilization']:.0%} of the slots used"
        title = f"{strategy}: {used}"
        draw_timeline(axes, run.outcome.engine.steps, title, names=num_slots <= MAX_NAMED_SLOTS)
    panels[-1].set_xlabel("seconds")
    figure.legend(handles=legend_entries(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _curves(comparison: Comparison) -> Figure:
    """What rising load does to throughput and latencies."""
    figure = Figure((WIDTH_INCHES, 7), DPI, layout="constrained")
    panels = _panels(figure, 2, 2)
    for axes, (x, y, scale, labels) in zip(
        panels,
        (
            ("output_tokens_per_second", "e2e_mean_ms", 1e-3, ("output tokens/s", "mean e2e (s)")),
            ("rate", "output_tokens_per_second", 1, ("offered requests/s", "output tokens/s")),
            ("rate", "ttft_p90_ms", 1e-3, ("offered requests/s", "TTFT p90 (s)")),
            ("rate", "slot_utilization", 1, ("offered requests/s", "slots used")),
        ),
        strict=True,
    ):
        for strategy in comparison.configs:
            runs = [comparison.loaded[load][strategy] for load in sorted(comparison.loaded)]
            colour, marker = STYLES[strategy]
            points = [
                ((run.figures | {"rate": run.rate or 0.0})[x], run.figures[y] * scale)
                for run in runs
            ]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=strategy)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False)
    return figure


def _distributions(runs: dict[str, Run]) -> Figure:
    """The share of requests at or below each value, for TTFT, TPOT and E2E."""
    figure = Figure((WIDTH_INCHES, 3.6), DPI, layout="constrained")
    panels = _panels(figure, 1, 3)
    for axes, (name, unit, scale) in zip(
        panels, (("ttft", "s", 1.0), ("tpot", "ms", 1e3), ("e2e", "s", 1.0)), strict=True
    ):
        for strategy, run in runs.items():
            values = [getattr(timeline, name) for timeline in run.outcome.timelines]
            known = np.sort([value * scale for value in values if value is not None])
            if known.size > 0:
                shares = np.arange(1, known.size + 1) / known.size
                axes.step(known, shares, where="post", color=STYLES[strategy][0], label=strategy)
        axes.set_xlabel(f"{name.upper()} ({unit})")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("share of requests")
    panels[0].legend(frameon=False)
    return figure


def _utilization(runs: dict[str, Run]) -> Figure:
    """Useful slots, and KV blocks in use, over time."""
    figure = Figure((WIDTH_INCHES, 4.6), DPI, layout="constrained")
    slots, blocks = _panels(figure, 2, 1, sharex=True)
    for strategy, run in runs.items():
        steps = run.outcome.engine.steps
        times = [step.end for step in steps]
        window = max(1, len(steps) // 150)  # single steps would hide the course
        useful = _mean_over(window, [step.num_useful_slots for step in steps])
        reserved = _mean_over(window, [step.num_slots for step in steps])
        used = run.outcome.engine.kv_usage
        colour = STYLES[strategy][0]
        slots.plot(times, useful / reserved, color=colour, label=strategy, linewidth=1.2)
        blocks.plot(times, used, color=colour, linewidth=1.2)
    for axes, label in ((slots, "slots used"), (blocks, "KV blocks used")):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    blocks.set_xlabel("seconds")
    slots.legend(frameon=False, loc="lower right")
    return figure


def _mean_over(window: int, values: Sequence[float]) -> np.typing.NDArray[np.float64]:
    kernel = np.ones(window)
    weights = np.convolve(np.ones(len(values)), kernel, mode="same")
    mean: np.typing.NDArray[np.float64] = np.convolve(values, kernel, mode="same") / weights
    return mean


def _panels(figure: Figure, rows: int, columns: int, *, sharex: bool = False) -> list[Axes]:
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex)
    return [axes for row in grid for axes in row]


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
