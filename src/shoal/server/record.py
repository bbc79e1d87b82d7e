"""What is remembered of an HTTP request for its log line."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from starlette.requests import Request

from shoal.engine.outputs import RequestMetrics
from shoal.server.never_fails import never_fails
from shoal.server.responses import Timeline

# Why a request was turned away without an answer.
Refusal = Literal["queue_full", "time_limit", "rejected", "invalid", "unavailable"]

_DIGITS = 6  # of seconds in the log and in answers: microseconds


@dataclass(slots=True)
class RequestRecord:
    """What the access log says about a request. Times are seconds of `time.monotonic`."""

    client_request_id: str  # the header's, or `request_id`
    method: str
    path: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique in this process
    start: float = field(default_factory=time.monotonic)
    status: int | None = None
    error_code: str | None = None
    refusal: Refusal | None = None
    num_choices: int = 1  # of the answer
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    time_to_first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)
    choices: list[RequestMetrics] = field(default_factory=list)  # ended, or cut off, and begun

    @never_fails
    def first_token(self, now: float) -> None:
        """Note the first token of any choice."""
        if self.time_to_first_token is None:
            self.time_to_first_token = now - self.start

    @never_fails
    def failed(self, error_code: str | None, refusal: Refusal | None) -> None:
        """Note the error that the client is told."""
        self.error_code = error_code
        self.refusal = refusal

    @never_fails
    def timeline(self) -> Timeline | None:
        """Where the time went, over all choices; None before one has ended or been cut off."""
        if not self.choices:
            return None
        queue_time = min(
            (c.queue_time for c in self.choices if c.queue_time is not None), default=None
        )
        ttft = min((c.ttft for c in self.choices if c.ttft is not None), default=None)
        e2e_time = max(c.e2e_time for c in self.choices)
        return Timeline(
            queue_time=_rounded(queue_time),
            prefill_time=_between(queue_time, ttft),
            decode_time=_between(ttft, e2e_time),
            ttft=_rounded(ttft),
            e2e_time=round(e2e_time, _DIGITS),
            num_preemptions=sum(c.num_preemptions for c in self.choices),
        )

    def log_line(self) -> str:
        """The record as one line of JSON; times in seconds."""
        line: dict[str, object] = {
            "request_id": self.client_request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration": round(time.monotonic() - self.start, _DIGITS),
        }
        if self.error_code is not None:
            line["error"] = self.error_code
        if self.prompt_tokens:
            line["prompt_tokens"] = self.prompt_tokens
            line["completion_tokens"] = self.completion_tokens
            line["cached_tokens"] = self.cached_tokens
            line["finish_reasons"] = self.finish_reasons
        if self.time_to_first_token is not None:
            line["time_to_first_token"] = round(self.time_to_first_token, _DIGITS)
        if (timeline := self.timeline()) is not None:
            line["queue_time"] = timeline.queue_time
            line["prefill_time"] = timeline.prefill_time
            line["decode_time"] = timeline.decode_time
        return msgspec.json.encode(line).decode()


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, _DIGITS)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else round(end - start, _DIGITS)


def record_of(request: Request) -> RequestRecord:
    """The record that the middleware made for a request."""
    record: RequestRecord = request.state.record
    return record
