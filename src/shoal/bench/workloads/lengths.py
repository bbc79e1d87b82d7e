"""How long prompts and answers are: distributions of token counts, and how flags name them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from cyclopts import Parameter

from shoal.config import ConfigError


class WorkloadError(ConfigError):
    """A workload can't be made from these settings; the message names the value and the limit."""


@dataclass(frozen=True, slots=True)
class LengthRange:
    """Token counts drawn uniformly from `low` to `high`, both included.

    Raises:
        WorkloadError: `low` is below 1 or above `high`.
    """

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise WorkloadError(f"a length range needs 1 <= low <= high, got {self}")

    def __str__(self) -> str:
        return f"{self.low}:{self.high}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "50:800", or "128" for one length.

        Raises:
            WorkloadError: the text is neither.
        """
        low, colon, high = text.partition(":")
        try:
            return cls(int(low), int(high if colon else low))
        except WorkloadError:
            raise
        except ValueError:
            raise WorkloadError(f"a length range is LOW:HIGH or one number, got {text!r}") from None

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class ExponentialLengths:
    """Token counts with an exponential distribution of that `mean`, cut to 1 to `cap`.

    Many short answers and a few long ones: the shape on which static batches wait longest. The
    cut makes the mean of the drawn lengths somewhat smaller than `mean`.

    Raises:
        WorkloadError: not 1 <= mean <= cap.
    """

    mean: int
    cap: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.cap:
            raise WorkloadError(f"exponential lengths need 1 <= mean <= cap, got {self}")

    def __str__(self) -> str:
        return f"exp:{self.mean}:{self.cap}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "exp:128:512": mean and cap.

        Raises:
            WorkloadError: the text is something else.
        """
        parts = text.split(":")
        if len(parts) != 3 or parts[0] != "exp" or not all(map(str.isdecimal, parts[1:])):
            raise WorkloadError(f"exponential lengths are exp:MEAN:CAP, got {text!r}")
        return cls(int(parts[1]), int(parts[2]))

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return min(self.cap, 1 + int(rng.expovariate(1 / self.mean)))


Lengths = LengthRange | ExponentialLengths


def parse_lengths(text: str) -> Lengths:
    """Read a length flag: "50:800", "128" or "exp:128:512".

    Raises:
        WorkloadError: it is none of these.
    """
    if text.startswith("exp"):
        return ExponentialLengths.parse(text)
    return LengthRange.parse(text)


def _parse_flag(_type: Any, tokens: Sequence[Any]) -> Lengths:
    return parse_lengths(tokens[0].value)


LengthFlag = Annotated[Lengths, Parameter(converter=_parse_flag, accepts_keys=False, n_tokens=1)]
