"""Prompts: random ones of a wanted length, or those of a file."""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shoal.bench.workloads.lengths import WorkloadError
from shoal.bench.workloads.recorded_load import BLOCK_TOKENS, RequestShape

Prompt = list[int] | str
Vocabulary = Sequence[int] | Sequence[str]

# Short and common, so that nearly every tokenizer has each of them, with the space before it, as
# one token: a text of n of them is about n tokens long.
WORDS: tuple[str, ...] = tuple(
    """
    the and for that with this from have not are was you they but his her she all which one were
    there been their has would will what can if when more who said about time them some could
    into other then two only like these may first any new over such our man most should now also
    people many well where how after work long year day life even way because own good must
    great state under years place high same old right house world hand part both each those
    found last few say need large small water school help number home again off went left end
    always public came group without though against head war social national general early
    course problem today order area full money change power history system city party given less
    case point country light hard second kind words late family open means white face market
    name book making later possible free show turned study level form human body story important
    children seen big young within better taken question space play across local clear land
    above ground line common four five six team list page food town river road north south east
    west green black red blue table door window paper letter music film game field tree plant
    animal dog horse fish bird sun moon star rain snow wind fire stone gold iron wood glass oil
    sea ship car train plane bank store price cost pay sell buy tax law court judge trial police
    army king queen church college class teacher student doctor health heart blood eye hair skin
    bone voice sound word sentence language english french german science theory test data model
    machine computer program code file type value
    """.split()  # noqa: SIM905 - a list literal would be 285 lines
)

_TEXT_FIELDS = ("prompt", "question", "text")


class RandomPrompts:
    """Makes prompts of random picks out of `vocabulary`: token ids, or words as text.

    Args:
        vocabulary: what to pick from; a word counts as one token.
        seed, salt: the same ones give the same prompts.
        shared_prefix_len: tokens with which all prompts begin.

    Raises:
        WorkloadError: `vocabulary` is empty.
    """

    def __init__(
        self, vocabulary: Vocabulary, seed: int, salt: str = "", shared_prefix_len: int = 0
    ) -> None:
        if not vocabulary:
            raise WorkloadError("the vocabulary has no ordinary tokens to make prompts of")
        self._vocabulary = vocabulary
        self._key = f"{seed} {salt}".rstrip()
        self._rng = random.Random(f"tokens {self._key}")
        self._prefix = self._pick(random.Random(f"prefix {self._key}"), shared_prefix_len)

    def make(self, shape: RequestShape) -> Prompt:
        """The next prompt: the shared prefix, and `shape.num_input` tokens of its own.

        A shape's blocks are the same tokens in every prompt that names them.
        """
        own: list[Any] = []
        for block in shape.blocks:
            own += self._pick(random.Random(f"block {block} {self._key}"), BLOCK_TOKENS)
        own += self._pick(self._rng, max(0, shape.num_input - len(own)))
        tokens = self._prefix + own[: shape.num_input]
        return " ".join(tokens) if isinstance(self._vocabulary[0], str) else tokens

    def _pick(self, rng: random.Random, count: int) -> list[Any]:
        return rng.choices(self._vocabulary, k=count)


class FilePrompts:
    """The prompts of a dataset in an order that depends on the seed; they repeat when used up.

    Each begins with a number of its own drawn from `salt`, so that no cache has seen it; without
    a salt it is left as it is. All of them begin with the same `shared_prefix_len` words.

    Raises:
        WorkloadError: the file isn't JSONL, or a line has no prompt; the message names the line.
        OSError: the file can't be read.
    """

    def __init__(self, path: Path, seed: int, salt: str = "", shared_prefix_len: int = 0) -> None:
        self._texts = list(_read(path))
        if not self._texts:
            raise WorkloadError(f"{path} has no prompts")
        random.Random(f"dataset {seed}").shuffle(self._texts)
        self._salts = random.Random(f"salts {salt}") if salt else None
        prefix = random.Random(f"prefix {seed} {salt}").choices(WORDS, k=shared_prefix_len)
        self._prefix = "".join(f"{word} " for word in prefix)
        self._next = 0

    def make(self) -> str:
        """The next prompt."""
        text = self._texts[self._next % len(self._texts)]
        self._next += 1
        mark = f"({self._salts.randrange(10**8):08}) " if self._salts is not None else ""
        return self._prefix + mark + text


def _read(path: Path) -> Iterator[str]:
    data = path.read_bytes()
    lines = (gzip.decompress(data) if path.suffix == ".gz" else data).split(b"\n")
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _text(msgspec.json.decode(line))
            except ValueError as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error


def _text(row: Any) -> str:
    """The prompt of a row; of a conversation its first turn."""
    if isinstance(row, dict):
        for name in _TEXT_FIELDS:
            if isinstance(row.get(name), str):
                return _not_empty(row[name])
        turns = row.get("turns")
        if isinstance(turns, list) and turns and isinstance(turns[0], str):
            return _not_empty(turns[0])
    raise ValueError(f"no text called one of {', '.join(_TEXT_FIELDS)}, and no list called turns")


def _not_empty(text: str) -> str:
    if not text:
        raise ValueError("the prompt is empty")
    return text
