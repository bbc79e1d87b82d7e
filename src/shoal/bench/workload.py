"""What a benchmark asks: prompts of random tokens, and how long each answer is to be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from cyclopts import Parameter

from shoal.config import ConfigError
from shoal.model.tokenizer import Tokenizer


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


def _parse_flag(_type: Any, tokens: Sequence[Any]) -> LengthRange:
    return LengthRange.parse(tokens[0].value)


LengthFlag = Annotated[
    LengthRange, Parameter(converter=_parse_flag, accepts_keys=False, n_tokens=1)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests with uniformly drawn lengths.

    Raises:
        WorkloadError: `num_requests` is below 1.
    """

    num_requests: int = 96
    """How many requests."""

    input_len: LengthFlag = LengthRange(50, 800)
    """Tokens of a prompt, as LOW:HIGH."""

    output_len: LengthFlag = LengthRange(20, 200)
    """Tokens of an answer, as LOW:HIGH; it always gets as many."""

    seed: int = 0
    """Another seed gives other lengths and other prompts."""

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise WorkloadError(f"num_requests must be at least 1, got {self.num_requests}")


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: its prompt, and the exact number of tokens to generate."""

    prompt_token_ids: list[int]
    max_tokens: int


def ordinary_token_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of all tokens that are text: prompts are made of these."""
    return [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]


def generate_requests(workload: Workload, token_ids: Sequence[int]) -> list[WorkloadRequest]:
    """Draw the requests of a workload; prompts are random picks from `token_ids`.

    The lengths depend on the seed and the ranges alone, so that every model gets the same
    lengths. Prompts of different seeds share nothing but chance, so that a prefix cache can't
    answer one from the other.

    Raises:
        WorkloadError: `token_ids` is empty.
    """
    if not token_ids:
        raise WorkloadError("the vocabulary has no ordinary tokens to make prompts of")
    lengths = random.Random(f"lengths {workload.seed}")
    tokens = random.Random(f"tokens {workload.seed}")
    requests = []
    for _ in range(workload.num_requests):
        num_input, num_output = workload.input_len.draw(lengths), workload.output_len.draw(lengths)
        requests.append(WorkloadRequest(tokens.choices(token_ids, k=num_input), num_output))
    return requests
