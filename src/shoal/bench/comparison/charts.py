"""The pictures of a comparison, readable at 1200 pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from shoal.bench.comparison.comparison import Comparison, Run
from shoal.bench.comparison.labels import place_labels
from shoal.bench.comparison.timeline import draw_timeline, legend_entries
from shoal.bench.results.measure import Slo
from shoal.bench.runs.steps import StepRecord

WIDTH_INCHES, DPI = 12, 100
MAX_NAMED_SLOTS = 8
POINTS_PER_INCH = 72
LABEL_SIZE, CHARACTER_WIDTH = 8, 0.7  # points; of a size, for digits and the percent sign
NUM_BINS = 200  # of a picture over time; single steps would hide the course

Floats = np.typing.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Style:
    """How a strategy is drawn: colours that colour-blind people tell apart, and dashes besides."""

    color: str
    marker: str
    linestyle: str

    @property
    def line(self) -> dict[str, Any]:
        """For a line without markers."""
        return {"color": self.color, "linestyle": self.linestyle, "linewidth": 1.8}


STYLES = {
    "static": Style("#d55e00", "s", "-"),
    "dynamic": Style("#009e73", "^", "--"),
    "continuous": Style("#0072b2", "o", "-."),
}


def draw_all(comparison: Comparison) -> dict[str, bytes]:
    """Every picture as PNG, by its name."""
    pictures = {
        "timeline": timelines(comparison.highest_load),
        "utilization": _utilization(comparison.highest_load),
        "distributions": _distributions(comparison.highest_load, comparison.slo),
    }
    if comparison.loaded:
        pictures["curves"] = curves(comparison)
    return {name: _png(figure) for name, figure in pictures.items()}


def timelines(runs: dict[str, Run]) -> Figure:
    """Requests over slots; all strategies on one time axis."""
    steps = {strategy: run.outcome.engine.steps for strategy, run in runs.items()}
    num_slots = max(len(step.rows) for of_one in steps.values() for step in of_one)
    height = 1.2 + len(runs) * min(3.0, 0.8 + 0.2 * num_slots)
    figure = Figure((WIDTH_INCHES, height), DPI, layout="constrained")
    panels = _panels(figure, len(runs), 1, sharex=True)
    for axes, (strategy, run) in zip(panels, runs.items(), strict=True):
        used = f"{run.figures['slot_utilization']:.0%} of the slots used"
        title = f"{strategy}: {used}, done after {steps[strategy][-1].end:.1f} s"
        draw_timeline(axes, steps[strategy], title, names=num_slots <= MAX_NAMED_SLOTS)
    panels[-1].set_xlim(0, max(of_one[-1].end for of_one in steps.values()))
    panels[-1].set_xlabel("seconds")
    figure.legend(handles=legend_entries(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def curves(comparison: Comparison) -> Figure:
    """What rising load does to throughput and latencies."""
    figure = Figure((WIDTH_INCHES, 7.4), DPI, layout="constrained")
    panels = _panels(figure, 2, 2)
    tokens, rate = "output tokens/s", "offered requests/s"
    for axes, (x, y, scale, labels) in zip(
        panels,
        (
            ("output_tokens_per_second", "e2e_mean_ms", 1e-3, (tokens, "E2E mean (s)")),
            ("rate", "output_tokens_per_second", 1, (rate, tokens)),
            ("rate", "ttft_p90_ms", 1e-3, (rate, "TTFT p90 (s)")),
            ("rate", "slot_utilization", 100, (rate, "slots used (%)")),
        ),
        strict=True,
    ):
        axes.margins(0.1)  # room for the loads beside the points
        for strategy in comparison.configs:
            runs = [comparison.loaded[load][strategy] for load in sorted(comparison.loaded)]
            xs = [(run.figures | {"rate": run.rate or 0.0})[x] for run in runs]
            ys = [run.figures[y] * scale for run in runs]
            style = STYLES[strategy]
            axes.plot(xs, ys, **style.line, marker=style.marker, label=strategy)
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    _add_legend(figure, panels[0])
    _name_loads(figure, panels[0], comparison)
    return figure


def _name_loads(figure: Figure, axes: Axes, comparison: Comparison) -> None:
    """Write the load beside each point of throughput and latency, which have no axis of it.

    The figure must be complete but for that: where there is room depends on where the axes lie.
    """
    names: list[tuple[str, str]] = []  # with their colours
    points: list[tuple[float, float]] = []
    for load, runs in comparison.loaded.items():
        for strategy, run in runs.items():
            names.append((f"{load:.0%}", STYLES[strategy].color))
            figures = run.figures
            points.append((figures["output_tokens_per_second"], figures["e2e_mean_ms"] / 1e3))
    figure.draw_without_rendering()
    in_points = axes.transData.transform(points) * POINTS_PER_INCH / DPI
    widest = max(len(name) for name, _ in names) * LABEL_SIZE * CHARACTER_WIDTH
    places = place_labels([(x, y) for x, y in in_points], widest, LABEL_SIZE)
    for (name, color), place in zip(names, places, strict=True):
        axes.annotate(
            name,
            place,
            xycoords="figure points",
            fontsize=LABEL_SIZE,
            color=color,
            path_effects=[withStroke(linewidth=2, foreground="white")],
            annotation_clip=False,
        ).set_in_layout(False)


def _distributions(runs: dict[str, Run], slo: Slo) -> Figure:
    """The share of requests at or below each value, for TTFT, TPOT and E2E, and the SLO."""
    figure = Figure((WIDTH_INCHES, 4), DPI, layout="constrained")
    panels = _panels(figure, 1, 3)
    for axes, (name, unit, scale) in zip(
        panels, (("ttft", "s", 1.0), ("tpot", "ms", 1e3), ("e2e", "s", 1.0)), strict=True
    ):
        for strategy, run in runs.items():
            values = [getattr(timeline, name) for timeline in run.outcome.timelines]
            known = sorted(value * scale for value in values if value is not None)
            if known:
                shares = np.linspace(0, 100, len(known) + 1)
                style = STYLES[strategy].line
                axes.step([known[0], *known], shares, where="post", **style, label=strategy)
        if (limit := getattr(slo, name)) is not None:
            axes.axvline(limit * scale, color="black", linestyle=":", linewidth=1.2)
            axes.annotate("SLO ", (limit * scale, 3), fontsize=8, rotation=90, ha="right")
        axes.set_xlabel(f"{name.upper()} ({unit})")
        axes.set_ylim(0, 102)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("requests (%)")
    _add_legend(figure, panels[0])
    return figure


def _utilization(runs: dict[str, Run]) -> Figure:
    """Useful slots, and KV blocks in use, over time."""
    figure = Figure((WIDTH_INCHES, 5), DPI, layout="constrained")
    slots, blocks = _panels(figure, 2, 1, sharex=True)
    for strategy, run in runs.items():
        engine, style = run.outcome.engine, STYLES[strategy].line
        edges = np.linspace(0, engine.steps[-1].end, NUM_BINS + 1)
        used = slots_used(engine.steps, edges) * 100
        slots.step(edges, [*used, used[-1]], where="post", **style, label=strategy)
        ends = [0.0, *(step.end for step in engine.steps)]
        blocks.step(ends, [0.0, *(share * 100 for share in engine.kv_usage)], where="post", **style)
    for axes, label in ((slots, "slots used (%)"), (blocks, "KV blocks used (%)")):
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    blocks.set_xlabel("seconds")
    _add_legend(figure, slots)
    return figure


def slots_used(steps: Sequence[StepRecord], edges: Floats) -> Floats:
    """The share of the slots that produced a wanted token, between each two `edges` in seconds.

    A step counts as long as it lasts; NaN where no step ran.
    """
    times = [time for step in steps for time in (step.start, step.end)]

    def between(amounts: Sequence[int]) -> Floats:
        """The integral of a step's amount over time, in each bin."""
        parts = [
            p for step, n in zip(steps, amounts, strict=True) for p in (0.0, n * _length(step))
        ]
        result: Floats = np.diff(np.interp(edges, times, np.cumsum(parts)))
        return result

    useful = between([step.num_useful_slots for step in steps])
    reserved = between([step.num_slots for step in steps])
    return np.divide(useful, reserved, out=np.full_like(useful, np.nan), where=reserved > 0)


def _length(step: StepRecord) -> float:
    return step.end - step.start


def _add_legend(figure: Figure, axes: Axes) -> None:
    """Name the lines of all panels below them, where they hide nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=len(labels),
        frameon=False,
        handlelength=3.5,
    )


def _panels(figure: Figure, rows: int, columns: int, *, sharex: bool = False) -> list[Axes]:
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex)
    return [axes for row in grid for axes in row]


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
