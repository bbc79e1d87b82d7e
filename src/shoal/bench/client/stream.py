"""Reads the stream of an answer: when each chunk came, and what the server says about it.

A chunk of a stream isn't a token. The times are those of the chunks; the counts are the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        if self.text:
            return True
        delta = self.delta
        return delta is not None and bool(
            delta.content or delta.reasoning_content or delta.reasoning
        )


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The tokens of a request as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the prefix cache had; None where the server doesn't tell."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class AnswerStream:
    """What has come of one answer; times are seconds on the clock of `feed`.

    `chunk_times` are the times of the chunks with text. Neither a chat's role nor an empty chunk is
    one.
    """

    chunk_times: list[float] = field(default_factory=list)
    finish_time: float = 0.0
    finish_reason: str | None = None
    usage: Usage | None = None
    error: str | None = None
    has_events: bool = False
    _rest: bytes = b""

    @property
    def num_tokens(self) -> int:
        """Output tokens by the server's usage; chunks with text if it tells none."""
        return self.usage.completion_tokens if self.usage is not None else len(self.chunk_times)

    def feed(self, data: bytes, now: float) -> None:
        """Take a piece of the body that came at `now`; it may end anywhere."""
        if self._rest:
            data = self._rest + data
        *lines, self._rest = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self.has_events = True
                self._read(line[5:].strip(), now)
            elif line.startswith(b"error:"):  # llama-server's way
                self.error = line[6:].decode(errors="replace").strip()

    def _read(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self.error = f"an event is not what OpenAI's API sends: {error}"
            return
        if event.error is not None:
            self.error = _message(event.error)
        if event.usage is not None:
            self.usage = event.usage
        for choice in event.choices:
            if choice.has_text():
                self.chunk_times.append(now)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason
                self.finish_time = now


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message if message is not None else error)


def error_message(body: bytes) -> str:
    """What the body of a response with an error status says, in one line."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        content = None
    if isinstance(content, dict):
        return _message(content.get("error") or content.get("detail") or content)
    return " ".join(body.decode(errors="replace").split())[:200]
