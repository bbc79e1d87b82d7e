"""A trace of the engine's steps and requests, for Perfetto or chrome://tracing.

The format is the Trace Event Format's JSON array. Times are microseconds of the engine's clock.
Steps stand on two tracks, what the scheduler and the executor did; the batch and the KV pool are
counters, as they are after each step. Requests have a track each, written when they have ended,
whatever way: a span from arrival to end, which says what its client calls it and why it ended, and
within it those of the phases that it reached.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from shoal.engine.core import StepReport
from shoal.request import Request
from shoal.scheduler.interface import RequestOutput, ScheduledStep

_PROCESS = 1
_SCHEDULER, _EXECUTOR = 1, 2

Event = dict[str, Any]

_logger = logging.getLogger(__name__)


class StepTrace:
    """Writes the trace to a file, a step at a time; implements `EngineObserver`.

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
        self._client_ids: dict[str, str] = {}  # of requests under way, by the engine's ids
        self._write(
            _name("process_name", 0, "shoal engine"),
            _name("thread_name", _SCHEDULER, "scheduler"),
            _name("thread_name", _EXECUTOR, "executor"),
        )

    def on_add(self, requests: Sequence[Request]) -> None:
        """Remember what the client calls its request."""
        for request in requests:
            if request.client_request_id:
                self._client_ids[request.request_id] = request.client_request_id

    def on_step(self, report: StepReport) -> None:
        """Write a step."""
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
                _request_event("preempted", "n", report.schedule_start, request_id)
                for request_id in step.preempted_request_ids
            ),
        )

    def on_end(self, output: RequestOutput) -> None:
        """Write what a request that has ended went through."""
        self._write(*_track_of(output, self._client_ids.pop(output.request_id, None)))

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
            self._file.flush()  # whole events: viewers read no half one, as a crash would leave
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


def _track_of(output: RequestOutput, client_id: str | None) -> Iterable[Event]:
    """The spans of an ended request; the last phase that it reached lasts to its end."""
    times = output.times
    if times is None or times.finished is None:
        return
    starts = {
        "queue": times.arrival,
        "prefill": times.first_scheduled,
        "decode": times.first_token,
        "end": times.finished,
    }
    reached = [(name, start) for name, start in starts.items() if start is not None]
    name = {} if client_id is None else {"args": {"client_request_id": client_id}}
    yield _request_event("request", "b", times.arrival, output.request_id) | name
    for (phase, start), (_, end) in pairwise(reached):
        yield _request_event(phase, "b", start, output.request_id)
        yield _request_event(phase, "e", end, output.request_id)
    yield _request_event("request", "e", times.finished, output.request_id) | {
        "args": _end_of(output)
    }


def _end_of(output: RequestOutput) -> Event:
    """Why a request ended, with the time limit or the error that made it end."""
    end: Event = {
        "finish_reason": output.finish_reason,
        "cached_tokens": output.num_cached_tokens,
        "preemptions": output.num_preemptions,
    }
    for name in ("stop_reason", "error"):
        if (value := getattr(output, name)) is not None:
            end[name] = value
    return end


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


def _request_event(name: str, kind: str, time: float, request_id: str) -> Event:
    """An event on a request's track: a beginning (b), an end (e) or a moment (n)."""
    return {
        "name": name,
        "ph": kind,
        "cat": "request",
        "id": request_id,
        "pid": _PROCESS,
        "tid": 0,
        "ts": time * 1e6,
    }


def _name(kind: str, thread: int, name: str) -> Event:
    return {"name": kind, "ph": "M", "pid": _PROCESS, "tid": thread, "args": {"name": name}}
