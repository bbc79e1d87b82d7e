"""How the figures of a run are written: the same numbers as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shoal.bench.results.measure import Distribution, Measurement

Figures = dict[str, float]


def figures_of(measurement: Measurement) -> Figures:
    """The figures by name; the name ends with the unit where it is not a count or a rate."""
    figures: Figures = {
        "requests_completed": measurement.num_completed,
        "requests_failed": measurement.num_failed,
    }
    if measurement.num_refused is not None:
        figures["requests_refused"] = measurement.num_refused
    figures |= {
        "duration_s": measurement.duration,
        "input_tokens": measurement.num_input_tokens,
        "output_tokens": measurement.num_output_tokens,
        "requests_per_second": measurement.requests_per_second,
        "input_tokens_per_second": measurement.input_tokens_per_second,
        "output_tokens_per_second": measurement.output_tokens_per_second,
    }
    for name, value in (
        ("goodput_requests_per_second", measurement.goodput),
        ("good_share", measurement.good_share),
        ("prefix_cache_hit_rate", measurement.prefix_cache_hit_rate),
    ):
        if value is not None:
            figures[name] = value
    for name in ("ttft", "itl", "tpot", "e2e"):
        distribution: Distribution | None = getattr(measurement, name)
        if distribution is not None:
            for statistic in ("mean", "p50", "p90", "p99", "max"):
                figures[f"{name}_{statistic}_ms"] = getattr(distribution, statistic) * 1e3
    if measurement.num_itls:
        figures["itl_count"] = measurement.num_itls
        figures["tokens_without_own_chunk"] = measurement.num_tokens_without_own_chunk
    return figures


def make_table(title: str, figures: Figures) -> Table:
    """A table with a row for each figure; counts are whole, the rest has three decimals."""
    table = Table("figure", title=title, title_justify="left")
    table.add_column("value", justify="right")
    for name, value in figures.items():
        table.add_row(name, f"{value:,.3f}" if isinstance(value, float) else f"{value:,}")
    return table


def print_table(title: str, figures: Figures) -> None:
    """Print the figures to standard output."""
    Console().print(make_table(title, figures))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a result with its context; an existing file is replaced."""
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
