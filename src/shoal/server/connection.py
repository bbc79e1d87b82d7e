"""The client's side of a request: its body, its hang-up, and the stream of events to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shoal.server.errors import (
    CLIENT_CLOSED_REQUEST,
    EXPECTED_ERRORS,
    ApiError,
    ClientDisconnectedError,
    ServerStoppedError,
    to_api_error,
)
from shoal.server.record import RequestRecord
from shoal.server.state import ServerState

MAX_BODY_BYTES = 8 * 1024 * 1024

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def read_body(request: Request) -> bytes:
    """The whole body.

    Raises:
        ApiError: 413, it is larger than `MAX_BODY_BYTES`.
        ClientDisconnectedError: the client went away before it was complete.
    """
    if (declared := request.headers.get("content-length", "")).isdecimal():
        _check_size(int(declared))
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        part = message.get("body", b"")
        size += len(part)
        _check_size(size)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _check_size(size: int) -> None:
    if size > MAX_BODY_BYTES:
        raise ApiError(
            413,
            f"The body is larger than {MAX_BODY_BYTES} bytes.",
            code="body_too_large",
            refusal="invalid",
        )


async def run_while_connected(
    state: ServerState, receive: Receive, work: Coroutine[Any, Any, T]
) -> T:
    """Await `work`, and cancel it when the client hangs up or the server stops.

    Raises:
        ClientDisconnectedError: the client went away; `work` has been cancelled.
        ServerStoppedError: the server stops now; `work` has been cancelled.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(receive))
    try:
        with state.stoppable(task):
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnectedError
        if task.cancelled():
            raise ServerStoppedError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Return when the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events: `first`, then those of `events`, then `[DONE]`.

    The first event is made before the response starts, so that an error up to there has its HTTP
    status. A later error becomes the last event, and no `[DONE]` follows it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        state: ServerState,
        record: RequestRecord,
        first: bytes,
        events: AsyncGenerator[bytes, None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._state = state
        self._record = record
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; the events' generator is closed however it ends."""
        del scope
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await run_while_connected(self._state, receive, self._send_events(send))
        except ClientDisconnectedError:
            self._record.status = CLIENT_CLOSED_REQUEST
            return
        except Exception as error:
            if not isinstance(error, EXPECTED_ERRORS):
                logger.exception("a stream failed")
            api_error = to_api_error(error)
            self._record.failed(api_error.code, api_error.refusal)
            await _send(send, event(api_error.body()))
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_events(self, send: Send) -> None:
        await _send(send, self._first)
        async for data in self._events:
            await _send(send, data)
        await _send(send, b"data: [DONE]\n\n")


async def _send(send: Send, body: bytes) -> None:
    try:
        await send({"type": "http.response.body", "body": body, "more_body": True})
    except RuntimeError as error:  # the event loop's word for a connection that has been closed
        raise ClientDisconnectedError from error


def event(data: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + data + b"\n\n"
