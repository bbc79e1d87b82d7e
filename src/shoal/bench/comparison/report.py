"""The report of a comparison: one HTML file that needs nothing beside it, and its pictures."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from rich.box import SIMPLE_HEAD
from rich.table import Table

from shoal.bench.comparison.charts import draw_all
from shoal.bench.comparison.comparison import Comparison, Run
from shoal.bench.results.disturbance import TAKEN
from shoal.bench.results.output_path import require_writable
from shoal.bench.results.report import Figures

Column = tuple[str, str, float, int]  # figure, heading, factor, decimals

COLUMNS: tuple[Column, ...] = (
    ("requests_per_second", "requests/s", 1, 2),
    ("output_tokens_per_second", "output tok/s", 1, 0),
    ("ttft_mean_ms", "TTFT mean (s)", 1e-3, 2),
    ("ttft_p99_ms", "TTFT p99 (s)", 1e-3, 2),
    ("tpot_mean_ms", "TPOT mean (ms)", 1, 1),
    ("e2e_mean_ms", "E2E mean (s)", 1e-3, 2),
    ("e2e_p99_ms", "E2E p99 (s)", 1e-3, 2),
    ("queue_time_mean_ms", "queueing (s)", 1e-3, 2),
    ("slot_utilization", "slots used", 1, 2),
    ("kv_cache_usage_max", "KV peak", 1, 2),
    ("preemptions", "preemptions", 1, 0),
    ("goodput_requests_per_second", "goodput (req/s)", 1, 2),
    (TAKEN, "others' CPU (%)", 100, 0),
    ("requests_failed", "failed", 1, 0),
    ("requests_refused", "refused", 1, 0),
)
ONLY_IF_ANY = ("preemptions", "requests_failed", "requests_refused")
TERMINAL_COLUMNS = (
    "output_tokens_per_second",
    "ttft_mean_ms",
    "tpot_mean_ms",
    "e2e_mean_ms",
    "slot_utilization",
)
CAPTIONS = {
    "timeline": "Requests over slots at the highest load; numbers are the requests in the order in "
    "which they came. White is a slot without work.",
    "curves": "Throughput and latency as the load rises; beside the points the load as a share of "
    "the highest throughput.",
    "distributions": "Share of requests at or below a latency, at the highest load.",
    "utilization": "Slots that produced a wanted token, and KV blocks in use, over time at the "
    "highest load.",
}


def results_table(comparison: Comparison) -> Table:
    """A row for each run with the most telling figures, narrow enough for a terminal."""
    columns = [column for column in COLUMNS if column[0] in TERMINAL_COLUMNS]
    table = Table(title="Strategies compared", title_justify="left", box=SIMPLE_HEAD)
    for heading in _headings(columns):
        is_name = heading in ("load", "strategy")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    for row in _rows(comparison, columns):
        table.add_row(*row)
    return table


def require_output(path: Path) -> None:
    """Make sure that the report at `path`, its JSON and its pictures can be written.

    Raises:
        ConfigError: one of them can't; the message says why.
    """
    pictures = (_picture_path(path, name) for name in CAPTIONS)
    for file in (path, path.with_suffix(".json"), *pictures):
        require_writable("output", file)


def write_html(path: Path, comparison: Comparison, content: Mapping[str, Any]) -> None:
    """Write the report to `path` and its pictures beside it.

    Raises:
        OSError: a file can't be written.
    """
    pictures = draw_all(comparison)
    for name, picture in pictures.items():
        _picture_path(path, name).write_bytes(picture)
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = files("shoal.bench.comparison").joinpath("templates/compare.html.j2").read_text()
    columns = _known_columns(comparison)
    html = environment.from_string(source).render(
        content=content,
        headings=_headings(columns),
        rows=_rows(comparison, columns),
        pictures=[
            (CAPTIONS[name], base64.b64encode(pictures[name]).decode())
            for name in CAPTIONS
            if name in pictures
        ],
    )
    path.write_text(html)


def _picture_path(path: Path, name: str) -> Path:
    return path.with_name(f"{path.stem}-{name}.png")


def _known_columns(comparison: Comparison) -> list[Column]:
    """The columns of figures that some run has, and that say something."""
    known = {
        name
        for _, _, run in comparison.rows()
        for name, value in run.figures.items()
        if value > 0 or name not in ONLY_IF_ANY
    }
    return [column for column in COLUMNS if column[0] in known]


def _headings(columns: Sequence[Column]) -> list[str]:
    return ["load", "strategy", "ratio", *(heading for _, heading, _, _ in columns)]


def _rows(comparison: Comparison, columns: Sequence[Column]) -> list[list[str]]:
    rows: list[list[str]] = []
    first: Run | None = None
    previous_load = ""
    for load, strategy, run in comparison.rows():
        if load != previous_load:
            first, previous_load = run, load
        assert first is not None
        name = "output_tokens_per_second"
        ratio = run.figures[name] / first.figures[name]
        cells = [_cell(run.figures, column) for column in columns]
        rows.append([load, strategy, f"{ratio:.2f}x", *cells])
    return rows


def _cell(figures: Figures, column: Column) -> str:
    name, _, factor, decimals = column
    return f"{figures[name] * factor:,.{decimals}f}" if name in figures else ""
