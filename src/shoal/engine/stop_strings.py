"""Finds stop strings in text that comes in pieces, and lets none of their text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that was found: the text that goes out before it, and the string itself."""

    text: str
    stop: str


class StopStringFinder:
    """Passes text through until one of `stops` is complete, as if characters came one by one.

    So the match that ends first wins; of two that end together, the longer. Text that could be
    the beginning of a stop string is held back until it is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """The text that may go out now, or the match that ends the stream."""
        if not self._stops:
            return text
        text = self._held + text
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        ]
        if matches:
            _, start, stop = min(matches)
            self._held = ""
            return StopMatch(text=text[:start], stop=stop)
        cut = len(text) - self._num_undecided(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The held text, when none follows."""
        held, self._held = self._held, ""
        return held

    def _num_undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        return max(
            (
                length
                for stop in self._stops
                for length in range(min(len(stop) - 1, len(text)), 0, -1)
                if text.endswith(stop[:length])
            ),
            default=0,
        )
