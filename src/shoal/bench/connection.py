"""A lean HTTP/1.1 client: one request at a time on a connection, the body as it comes.

The load generator must not be the bottleneck of what it measures. A general client wraps each
piece of a body in several objects and coroutines; here httptools parses, and a callback gets the
piece with the time at which it came.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from shoal.config import ConfigError

# Servers close idle connections after five seconds or more. One that is likely to be closed while
# the next request is on its way isn't used again: the second try would cost that request time.
MAX_IDLE_SECONDS = 3.0

BodySink = Callable[[bytes, float], None]
Clock = Callable[[], float]


class TransportError(Exception):
    """The server can't be reached, hung up, or doesn't speak HTTP; `kind` is one word for it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Response:
    """The head of a response; `end` is when its last byte came."""

    status: int = 0
    content_type: str = ""
    end: float = 0.0


class Connection(asyncio.Protocol):
    """One connection to the server.

    Args:
        clock: seconds on a monotonic clock.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response = Response()
        self._sink: BodySink = _ignore
        self._done: asyncio.Future[Response] | None = None
        self._now = 0.0
        self._has_length = False
        self._in_body = False
        self.idle_since = 0.0
        self.has_answered = False  # anything of the response to the newest request has come

    async def exchange(self, request: bytes, sink: BodySink) -> Response:
        """Send a whole request and return the head of the response when its body has ended.

        Args:
            request: head and body.
            sink: is given each piece of a body with status 200 and the time at which it came, and
                each piece of any other.

        Raises:
            TransportError: the server hung up before the end, or what it sent isn't HTTP.
        """
        if self._transport is None or self._transport.is_closing():
            raise TransportError("disconnected", "the server closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._response = Response()
        self._sink = sink
        self._has_length = self._in_body = self.has_answered = False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done = None
            self._sink = _ignore
            self.idle_since = self._clock()

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent on it."""
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and self._clock() - self.idle_since < MAX_IDLE_SECONDS
        )

    def close(self) -> None:
        """Drop the connection; what the server still sends is lost."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Note the time, then parse."""
        self._now = self._clock()
        self.has_answered = True
        if self._done is None:
            self.close()  # nobody asked: the next response would be taken for another's
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(TransportError("not_http", f"the server doesn't speak HTTP: {error}"))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """End what was under way; a body without a length ends with its connection."""
        if self._in_body and not self._has_length:
            self._now = self._clock()
            self.on_message_complete()
        else:
            reason = f": {exc}" if exc is not None else ""
            self._fail(TransportError("disconnected", f"the server hung up{reason}"))

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep what is needed of the head."""
        name = name.lower()
        if name == b"content-type":
            self._response.content_type = value.decode("latin-1").partition(";")[0].strip().lower()
        elif name in {b"content-length", b"transfer-encoding"}:
            self._has_length = True

    def on_headers_complete(self) -> None:
        """The status is known."""
        self._response.status = self._parser.get_status_code()
        self._in_body = self._response.status >= 200

    def on_body(self, body: bytes) -> None:
        """Hand a piece on."""
        self._sink(body, self._now)

    def on_message_complete(self) -> None:
        """The response is whole, unless it only announced one (status 1xx)."""
        if self._response.status < 200:
            self._response, self._has_length = Response(), False
            return
        self._in_body = False
        self._response.end = self._now
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)
        if not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()

    def _fail(self, error: TransportError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


def _ignore(_body: bytes, _now: float) -> None:
    pass


class HttpClient:
    """Sends requests to one server and keeps the connections that it allows to be kept.

    Args:
        base_url: http:// or https://, with or without the /v1 at its end.
        api_key: sent as a bearer token.
        clock: seconds on a monotonic clock.

    Raises:
        ConfigError: the URL isn't one of HTTP, or the key can't be sent.
    """

    def __init__(
        self, base_url: str, api_key: str | None = None, clock: Clock = time.monotonic
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in {"http", "https"} or not url.hostname or not base_url.isascii():
            raise ConfigError(f"base_url must be http://... or https://..., got {base_url!r}")
        try:
            self._port = url.port or (443 if url.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"base_url has no valid port: {base_url!r}") from error
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key has characters that a header can't carry")
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._root = url.path.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._idle: list[Connection] = []
        key = f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        self._headers = f"Host: {url.netloc.rpartition('@')[2]}\r\n{key}"

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def post(self, path: str, body: bytes, sink: BodySink) -> Response:
        """POST a JSON body; `path` begins with a slash.

        Raises:
            TransportError: as `Connection.exchange`, or the server can't be reached.
        """
        head = f"POST {self._root}{path} HTTP/1.1\r\n{self._headers}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return await self._send(head.encode("latin-1") + body, sink)

    async def get(self, path: str, sink: BodySink) -> Response:
        """GET `path`.

        Raises:
            TransportError: as `post`.
        """
        head = f"GET {self._root}{path} HTTP/1.1\r\n{self._headers}\r\n"
        return await self._send(head.encode("latin-1"), sink)

    async def _send(self, request: bytes, sink: BodySink) -> Response:
        """Send on an idle connection, and on a new one if the server has just closed that one."""
        if (connection := self._pop_idle()) is not None:
            try:
                return await self._exchange(connection, request, sink)
            except TransportError:
                if connection.has_answered:
                    raise
        return await self._exchange(await self._connect(), request, sink)

    async def _exchange(self, connection: Connection, request: bytes, sink: BodySink) -> Response:
        try:
            response = await connection.exchange(request, sink)
        except BaseException:
            connection.close()  # also when cancelled: the server then stops generating
            raise
        if connection.reusable:
            self._idle.append(connection)
        return response

    def _pop_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
            )
        except OSError as error:
            place = f"{self._host}:{self._port}"
            raise TransportError("unreachable", f"{place} can't be reached: {error}") from error
        return connection
