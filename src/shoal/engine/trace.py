"""A trace of the engine's steps and requests, for Perfetto or chrome://tracing.

The format is the Trace Event Format's JSON array. Times are microseconds of the engine's clock.
Steps stand on two tracks, what the scheduler and the executor did; requests on a track each, from
their arrival to their end; the batch and the KV pool are counters, as they are after each step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from shoal.engine.core import StepReport
from shoal.scheduler.interface import RequestOutput, ScheduledStep

_PROCESS = 1
_SCHEDULER, _EXECUTOR = 1, 2
_PHASES = (
    ("queue", "arrival", "first_scheduled"),
    ("prefill", "first_scheduled", "first_token"),
    ("decode", "first_token", "finished"),
)

Event = dict[str, Any]

_logger = logging.getLogger(__name__)


class StepTrace:
    """Writes the trace to a file, a step at a time; implements `StepObserver`.

    Viewers also read a file whose end is missing, as after a crash. When the file can't be written
    any more, the trace ends there with an error in the log, and the engine goes on.

    Raises:
        OSError: the file can't be created.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._separator = b"[\n"
        self._has_failed = False
        self._num_useful_slots = 0  # of all steps so far
        self._write(
            _name("process_name", 0, "shoal engine"),
            _name("thread_name", _SCHEDULER, "scheduler"),
            _name("thread_name", _EXECUTOR, "executor"),
        )

    def on_step(self, report: StepReport) -> None:
        """Write a step, and the requests that ended with it."""
        step, stats = report.step, report.stats
        batch = _batch_of(step) | {"useful": stats.num_useful_slots - self._num_useful_slots}
        self._num_useful_slots = stats.num_useful_slots
        self._write(
            _span("schedule", _SCHEDULER, report.schedule_start, report.execute_start, {}),
            _span("execute", _EXECUTOR, report.execute_start, report.update_start, batch),
            _span("update", _SCHEDULER, report.update_start, report.update_end, {}),
            _counter(
                "requests",
                report.execute_start,
                {
                    "running": stats.num_requests_running,
                    "waiting": stats.num_requests_waiting,
                },
            ),
            _counter(
                "KV blocks",
                report.execute_start,
                {
                    "used": stats.num_blocks_used,
                    "free": stats.num_blocks_total - stats.num_blocks_used,
                },
            ),
            *(
                _instant("preempted", report.schedule_start, request_id)
                for request_id in step.preempted_request_ids
            ),
        )
        for output in report.outputs:
            if output.finish_reason is not None:
                self._write(*_phases_of(output))

    def close(self) -> None:
        """Complete the file."""
        try:
            if not self._has_failed:
                self._file.write(b"\n]\n")
            self._file.close()
        except OSError as error:
            self._fail(error)

    def _write(self, *events: Event) -> None:
        if self._has_failed:
            return
        try:
            for event in events:
                self._file.write(self._separator + msgspec.json.encode(event))
                self._separator = b",\n"
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        self._has_failed = True
        _logger.error("the trace ends here, its file can't be written: %s", error)


def _batch_of(step: ScheduledStep) -> Event:
    """What a step computes: its size, and the ids of its requests by what they are in it for."""
    rows: dict[str, list[str]] = {"prefill": [], "decode": [], "padding": []}
    for row in step.requests:
        is_decode = row.num_computed_tokens >= row.request.num_prompt_tokens
        kind = "padding" if row.is_padding else "decode" if is_decode else "prefill"
        rows[kind].append(row.request.request_id)
    return {
        "step": step.step_id,
        "tokens": step.num_scheduled_tokens,
        "slots": step.num_slots,
        "rows": rows,
    }


def _phases_of(output: RequestOutput) -> Iterable[Event]:
    """What an ended request went through, on a track of its own."""
    if output.times is None:
        return
    for phase, start_name, end_name in _PHASES:
        start, end = getattr(output.times, start_name), getattr(output.times, end_name)
        if start is not None and end is not None:
            common = {"name": phase, "cat": "request", "id": output.request_id, "pid": _PROCESS}
            yield common | {"ph": "b", "ts": start * 1e6, "tid": 0}
            yield common | {"ph": "e", "ts": end * 1e6, "tid": 0}


def _span(name: str, thread: int, start: float, end: float, arguments: Event) -> Event:
    return {
        "name": name,
        "ph": "X",
        "pid": _PROCESS,
        "tid": thread,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": arguments,
    }


def _counter(name: str, time: float, values: Event) -> Event:
    return {"name": name, "ph": "C", "pid": _PROCESS, "ts": time * 1e6, "args": values}


def _instant(name: str, time: float, request_id: str) -> Event:
    return {
        "name": name,
        "ph": "n",
        "cat": "request",
        "id": request_id,
        "pid": _PROCESS,
        "tid": 0,
        "ts": time * 1e6,
    }


def _name(kind: str, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}
