"""A server with OpenAI's API that says what its script says, when it says so, on real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def text(content: str, finish_reason: str | None = None) -> bytes:
    """A chunk of /v1/completions."""
    return event({"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}]})


def delta(finish_reason: str | None = None, **fields: str) -> bytes:
    """A chunk of /v1/chat/completions."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]})


def usage(num_input: int, num_output: int, num_cached: int | None = None) -> bytes:
    tokens: dict[str, Any] = {"prompt_tokens": num_input, "completion_tokens": num_output}
    if num_cached is not None:
        tokens["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return event({"choices": [], "usage": tokens})


@dataclass
class Answer:
    """`events` are pairs of the seconds to wait and what to send then."""

    events: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    content_type: str = "text/event-stream"
    hang_up: bool = False  # instead of ending the body


def tokens(count: int, first: float, gap: float, *, num_input: int = 10) -> Answer:
    """`count` tokens, each in a chunk: the first after `first` seconds, the others `gap` apart."""
    events = [(first, text("a"))] + [(gap, text("b"))] * (count - 1)
    delay, _ = events.pop()
    events += [(delay, text("c", "length")), (0.0, usage(num_input, count) + DONE)]
    return Answer(events)


@dataclass
class Request:
    """What came and when, and when each event of the answer was sent."""

    path: str
    body: Any
    received: float
    sent: list[float] = field(default_factory=list)


Script = Callable[[int, Request], Answer]


class MockServer:
    """Answers the n-th generation request (from 0) with `script(n, request)`.

    /reset_prefix_cache is there if `can_reset`, /tokenize if `tokenize` tells the ids for a body;
    everything else finds nothing. A request to `silent` gets no answer at all.
    """

    def __init__(
        self,
        script: Script,
        *,
        can_reset: bool = False,
        tokenize: Callable[[Any], Sequence[int]] | None = None,
        silent: str | None = None,
    ) -> None:
        self._script = script
        self._tokenize = tokenize
        self._can_reset = can_reset
        self._silent = silent
        self.connections: list[asyncio.Task[None]] = []
        self.requests: list[Request] = []  # in the order in which they came

    @property
    def generations(self) -> list[Request]:
        return [r for r in self.requests if r.path.endswith("completions")]

    async def __aenter__(self) -> MockServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections.append(asyncio.current_task())
        try:
            while True:
                request = await self._read(reader)
                self.requests.append(request)
                await self._answer(request, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # one side has hung up, or the test is over
        finally:
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Request:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        received = time.monotonic()
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Request(head[0].split()[1], json.loads(body) if body else None, received)

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        if request.path == self._silent:
            return
        if request.path == "/v1/models":
            answer = Answer([(0.0, b'{"data": [{"id": "mock"}]}')], 200, "application/json")
        elif request.path == "/reset_prefix_cache" and self._can_reset:
            answer = Answer([(0.0, b"{}")], 200, "application/json")
        elif request.path == "/tokenize" and self._tokenize is not None:
            ids = json.dumps({"tokens": list(self._tokenize(request.body))}).encode()
            answer = Answer([(0.0, ids)], 200, "application/json")
        elif request.path.endswith("completions"):
            answer = self._script(len(self.generations) - 1, request)
        else:
            answer = Answer([], 404)
        head = f"HTTP/1.1 {answer.status} Whatever\r\nContent-Type: {answer.content_type}\r\n"
        writer.write(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        due = time.monotonic()
        for delay, data in answer.events:
            due += delay
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            request.sent.append(time.monotonic())
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        if answer.hang_up:
            await writer.drain()
            raise ConnectionResetError
        writer.write(b"0\r\n\r\n")
