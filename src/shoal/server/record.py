"""What is remembered of an HTTP request for its log line."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request


@dataclass(slots=True)
class RequestRecord:
    """What the access log says about a request. Times are seconds of `time.monotonic`."""

    client_request_id: str  # the header's, or `request_id`
    method: str
    path: str
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # unique in this process
    start: float = field(default_factory=time.monotonic)
    status: int | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    time_to_first_token: float | None = None
    finish_reasons: list[str] = field(default_factory=list)

    def first_token(self, now: float) -> None:
        """Note the first token of any choice."""
        if self.time_to_first_token is None:
            self.time_to_first_token = now - self.start

    def log_line(self) -> str:
        """The record as one line of JSON; times in seconds."""
        line: dict[str, object] = {
            "request_id": self.client_request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "duration": round(time.monotonic() - self.start, 4),
        }
        if self.prompt_tokens:
            line["prompt_tokens"] = self.prompt_tokens
            line["completion_tokens"] = self.completion_tokens
            line["finish_reasons"] = self.finish_reasons
        if self.time_to_first_token is not None:
            line["time_to_first_token"] = round(self.time_to_first_token, 4)
        return msgspec.json.encode(line).decode()


def record_of(request: Request) -> RequestRecord:
    """The record that the middleware made for a request."""
    record: RequestRecord = request.state.record
    return record
