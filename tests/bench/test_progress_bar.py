"""The progress bar is there on a terminal, and leaves other outputs clean."""

from __future__ import annotations

import io
import sys

import pytest
from rich.progress import MofNCompleteColumn

from shoal.bench.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_the_bar_tells_on_a_terminal_alone_what_is_done(
    monkeypatch: pytest.MonkeyPatch, kind: type[io.StringIO]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stderr = kind()
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress_bar(MofNCompleteColumn(), description="requests") as update:
        update(completed=2, total=3)
        update(completed=3, description="the last one")
    shown = stderr.getvalue()
    if kind is Terminal:
        assert "the last one" in shown
        assert "3/3" in shown
    else:
        assert shown == ""
