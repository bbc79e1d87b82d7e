"""Traces of real services: when requests arrived, and how many tokens went in and came out.

Read are CSV files with a header and JSONL files, under the column names of the public traces:
Azure's (with timestamps, or replayed in seconds), Mooncake's (milliseconds, and the blocks of 512
tokens that prompts share), and files of lengths alone.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from shoal.bench.workloads.lengths import WorkloadError

BLOCK_TOKENS = 512  # of a Mooncake trace's hash_ids

_INPUT = ("num_prefill_tokens", "input_length", "input_tokens", "ContextTokens")
_OUTPUT = ("num_decode_tokens", "output_length", "output_tokens", "GeneratedTokens")
# Each with the seconds of its unit; None for dates.
_ARRIVAL: Mapping[str, float | None] = {
    "arrived_at": 1.0,
    "arrival": 1.0,
    "arrival_time": 1.0,
    "timestamp": 1e-3,
    "TIMESTAMP": None,
}

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """How many tokens a request has, and when it arrives, in seconds; None where none is told.

    `blocks` name the shared pieces of `BLOCK_TOKENS` tokens that the prompt is made of; `cut` says
    that a length is smaller than the trace has it.
    """

    num_input: int
    num_output: int
    arrival: float | None = None
    blocks: tuple[int, ...] = ()
    cut: bool = False

    def cut_to(self, max_input: int, max_output: int) -> RequestShape:
        """The same request with at most so many tokens."""
        if self.num_input <= max_input and self.num_output <= max_output:
            return self
        return replace(
            self,
            num_input=min(self.num_input, max_input),
            num_output=min(self.num_output, max_output),
            cut=True,
        )


@dataclass(frozen=True, slots=True)
class Stretch:
    """The part of a trace that is replayed: from `start` for `duration`, in the trace's seconds."""

    start: float = 0.0
    duration: float | None = None

    def of(self, shapes: Iterable[RequestShape]) -> list[RequestShape]:
        """The requests of the stretch in the order of arrival; times count from its start."""
        end = math.inf if self.duration is None else self.start + self.duration
        chosen = [
            replace(shape, arrival=shape.arrival - self.start)
            for shape in shapes
            if shape.arrival is not None and self.start <= shape.arrival < end
        ]
        return sorted(chosen, key=lambda shape: shape.arrival or 0.0)


def read_trace(path: Path) -> list[RequestShape]:
    """The rows of a trace in file order; the first arrival is at 0.

    Raises:
        WorkloadError: the file has no rows, lacks a column, or a value is not a count above 0 or
            not a time; the message names the row.
        OSError: the file can't be read.
    """
    shapes = []
    for number, row in enumerate(_rows(path), start=1):
        try:
            shapes.append(_shape(row))
        except (KeyError, TypeError, ValueError) as error:
            reason = error.args[0] if error.args else error
            raise WorkloadError(f"{path}, row {number}: {reason}") from error
    if not shapes:
        raise WorkloadError(f"{path} has no rows")
    arrivals = [shape.arrival for shape in shapes if shape.arrival is not None]
    if not arrivals:
        return shapes
    first = min(arrivals)
    return [replace(shape, arrival=(shape.arrival or 0.0) - first) for shape in shapes]


def _rows(path: Path) -> Iterator[Row]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        if path.suffix != ".jsonl":
            yield from csv.DictReader(file)
            return
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield msgspec.json.decode(line, type=dict[str, Any])
                except msgspec.DecodeError as error:
                    raise WorkloadError(f"{path}, line {number}: {error}") from error


def _shape(row: Row) -> RequestShape:
    return RequestShape(
        num_input=_count(row, _INPUT),
        num_output=_count(row, _OUTPUT),
        arrival=_arrival(row),
        blocks=tuple(map(int, row.get("hash_ids", ()))),
    )


def _count(row: Row, names: Sequence[str]) -> int:
    name = next((name for name in names if name in row), None)
    if name is None:
        raise ValueError(f"no column is called one of {', '.join(names)}")
    if (count := int(row[name])) < 1:
        raise ValueError(f"{name} must be at least 1, got {count}")
    return count


def _arrival(row: Row) -> float | None:
    for name, unit in _ARRIVAL.items():
        if name in row:
            if unit is None:
                return datetime.fromisoformat(row[name]).timestamp()
            return float(row[name]) * unit
    return None
