"""The progress bar of a measurement: on a terminal's standard error, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn


class Update(Protocol):
    """Changes what the bar shows; what isn't given stays."""

    def __call__(
        self,
        *,
        completed: float | None = None,
        total: float | None = None,
        description: str | None = None,
    ) -> None:
        """Show it."""


@contextmanager
def progress_bar(
    *columns: ProgressColumn, description: str = "", total: float | None = None
) -> Iterator[Update]:
    """Show what is done of `total`, and behind the bar the `columns`."""
    bar = Progress(
        "{task.description}",
        BarColumn(),
        *columns,
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        refresh_per_second=4,
    )
    with bar:
        yield partial(bar.update, bar.add_task(description, total=total))
