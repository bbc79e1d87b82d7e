"""What one setting brought when it was tried, and the vocabulary of the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Protocol, Self

from shoal.bench.results.report import Figures
from shoal.bench.tuning.space import Setting


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """Higher is better; `tie_breaker` decides between equal values."""

    value: float
    tie_breaker: float = 0.0

    @classmethod
    def median_of(cls, scores: Sequence[Score]) -> Self:
        """The medians of both parts."""
        return cls(
            median(score.value for score in scores), median(score.tie_breaker for score in scores)
        )


class Status(StrEnum):
    """How a trial ended."""

    MEASURED = "measured"
    WORSE = "given up"  # it could not reach the score that it had to
    FAILED = "failed"  # requests brought no answer
    OUT_OF_TIME = "out of time"


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting and what was measured; the score is None unless it was measured to the end.

    `rate` are the requests a second that it was measured at; None is all at once. `seconds` is
    what the trial took, `run_seconds` one run of it where it had several. `message` says why it
    failed.
    """

    setting: Setting
    status: Status
    seconds: float
    score: Score | None = None
    figures: Figures = field(default_factory=dict)
    rate: float | None = None
    run_seconds: float | None = None
    message: str = ""

    @property
    def repeat_seconds(self) -> float:
        """What a repetition takes."""
        return self.seconds if self.run_seconds is None else self.run_seconds


class Objective(Protocol):
    """What is to be as high as possible, and how it is measured."""

    @property
    def closeness(self) -> float:
        """Settings worse by this share are still measured to the end; below 0 it is how much
        better one has to be for that."""

    def measure(self, setting: Setting, to_reach: float | None, seconds: float) -> Trial:
        """Try a setting within `seconds`; it may be given up once it can't reach `to_reach`."""

    def repeat(self, setting: Setting, best: Trial, seconds: float) -> Trial:
        """Try a setting to the end, in the way that tells it from the best one most clearly."""
