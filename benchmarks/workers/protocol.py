"""What peers.py and its workers say to each other; the standard library alone.

A worker is a process in its engine's own virtual environment. It loads the model once, writes one
JSON line that describes the engine, then answers one JSON line (a job) with one (a measurement)
until its standard input ends. Engines print as they like: the worker's own lines go out on a copy
of standard output, and standard output itself is sent to standard error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Engine:
    """What a worker has loaded."""

    name: str
    version: str
    weights: str  # the format of the linear weights in the model file
    settings: dict[str, str]  # those that differ from the engine's defaults, or matter
    load_seconds: float


@dataclass(frozen=True, slots=True)
class Job:
    """Greedy requests to run together; row i ends after exactly `max_tokens[i]` tokens.

    `kind` is "workload", "decode" or "prefill"; it says which figure is wanted, so that an engine
    may use the tool of its own that measures it best.
    """

    kind: str
    prompts: list[list[int]]
    max_tokens: list[int]
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """The figures of a job.

    `seconds` runs from handing over the first request to the last token. The decode phase starts
    when the last row has its first token: `decode_tokens` come after it, in `decode_seconds`.
    """

    seconds: float
    input_tokens: int
    output_tokens: int
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Timeline:
    """Collects when the rows of a job get their tokens."""

    def __init__(self, num_rows: int) -> None:
        self._counts = [0] * num_rows
        self._rows_without_token = num_rows
        self._tokens_before_decode = 0
        self._decode_start = 0.0
        self._last = 0.0
        self._start = time.perf_counter()

    def record(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Note that each of `rows` has just got its count of new tokens."""
        self._last = time.perf_counter()
        for row, count in zip(rows, counts, strict=True):
            if count and not self._counts[row]:
                self._rows_without_token -= 1
            self._counts[row] += count
        if self._rows_without_token == 0 and self._decode_start == 0.0:
            self._decode_start = self._last
            self._tokens_before_decode = sum(self._counts)

    def measurement(self, job: Job) -> Measurement:
        """The job's figures.

        Raises:
            RuntimeError: a row got another number of tokens than the job asked for.
        """
        if self._counts != job.max_tokens:
            wrong = [
                f"row {row}: {got} of {want}"
                for row, (got, want) in enumerate(zip(self._counts, job.max_tokens, strict=True))
                if got != want
            ]
            raise RuntimeError(f"wrong numbers of tokens: {', '.join(wrong[:5])}")
        total = sum(self._counts)
        return Measurement(
            seconds=self._last - self._start,
            input_tokens=sum(map(len, job.prompts)),
            output_tokens=total,
            decode_tokens=total - self._tokens_before_decode,
            decode_seconds=self._last - self._decode_start,
        )


def serve(load: Callable[[], tuple[Engine, Callable[[Job], Measurement]]]) -> None:
    """Load the engine, say what it is, then run jobs until standard input ends.

    A termination signal raises SystemExit, so that a worker can stop processes of its own.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine, run = load()
    print(json.dumps(asdict(engine)), file=replies)
    for line in sys.stdin:
        print(json.dumps(asdict(run(Job(**json.loads(line))))), file=replies)
