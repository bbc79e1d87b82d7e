"""Reads what an engine did from the trace that `--trace-file` has written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shoal.bench.errors import BenchError
from shoal.bench.runs.steps import EngineRecord, RowKind, StepRecord

Event = dict[str, Any]


def read_engine_record(path: Path, since: float) -> EngineRecord:
    """The steps and requests that began at `since` (seconds, the engine's clock) or later.

    Requests are numbered in the order in which they were first computed.

    Raises:
        BenchError: the file is no such trace, or holds no step after `since`.
    """
    reader = _Reader(since)
    try:
        reader.read(msgspec.json.decode(path.read_bytes(), type=list[Event]))
    except (OSError, msgspec.DecodeError, KeyError) as error:
        raise BenchError(f"the step trace {path} can't be read: {error!r}") from error
    if not reader.steps:
        raise BenchError(f"the step trace {path} has no step of the measured requests")
    return EngineRecord(reader.steps, reader.queue_times, reader.num_blocks, reader.num_preemptions)


@dataclass(slots=True)
class _Reader:
    """Goes through the events in their order: a step, then its counters."""

    since: float
    steps: list[StepRecord] = field(default_factory=list)
    queue_times: list[float] = field(default_factory=list)
    num_blocks: int = 0
    num_preemptions: int = 0
    _names: dict[str, str] = field(default_factory=dict)  # of requests, by their long ids
    _arrivals: dict[str, float] = field(default_factory=dict)  # of requests not begun

    def read(self, events: Iterable[Event]) -> None:
        step: Event = {}
        num_waiting = 0
        for event in events:
            time = event.get("ts", 0.0) / 1e6 - self.since
            if time < 0:
                continue
            match event["name"], event["ph"]:
                case "execute", _:
                    step = event
                case "requests", _:
                    num_waiting = event["args"]["waiting"]
                case "KV blocks", _:
                    self._add_step(step, time, num_waiting, event["args"])
                case "preempted", _:
                    self.num_preemptions += 1
                case "queue", "b":
                    self._arrivals[event["id"]] = time
                case "prefill", "b" if event["id"] in self._arrivals:
                    self.queue_times.append(time - self._arrivals.pop(event["id"]))

    def _add_step(self, step: Event, start: float, num_waiting: int, blocks: Event) -> None:
        batch = step["args"]
        self.num_blocks = blocks["used"] + blocks["free"]
        self.steps.append(
            StepRecord(
                start=start,
                end=start + step["dur"] / 1e6,
                rows={
                    self._names.setdefault(request_id, str(len(self._names))): RowKind(kind)
                    for kind, request_ids in batch["rows"].items()
                    for request_id in request_ids
                },
                num_tokens=batch["tokens"],
                num_slots=batch["slots"],
                num_useful_slots=batch["useful"],
                num_blocks_used=blocks["used"],
                num_waiting=num_waiting,
            )
        )
