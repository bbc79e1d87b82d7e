"""A lean HTTP/1.1 client: one request at a time on a connection, the body as it comes.

The load generator must not be the bottleneck of what it measures. A general client wraps each
piece of a body in several objects and coroutines; here httptools parses, and a callback gets the
piece with the time at which it came. Connections are opened before they are needed and kept.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit
from weakref import WeakSet

import httptools

from shoal.bench.client.timer import Clock
from shoal.bench.client.wire import Wire, open_wire
from shoal.config import ConfigError

# Servers close idle connections after five seconds or more. One that is likely to be closed while
# the next request is on its way isn't used again: the second try would cost that request time.
MAX_IDLE_SECONDS = 3.0

MAX_CONNECTING = 8  # at once, before there is a request to send
MAX_CONNECT_SECONDS = 5.0  # of an attempt before there is a request to send

BodySink = Callable[[bytes, float], None]


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


class Connection:
    """One connection to the server; made by `open`.

    Args:
        clock: seconds on a monotonic clock.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._wire: Wire | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._response = Response()
        self._sink: BodySink = _ignore
        self._done: asyncio.Future[Response] | None = None
        self._now = 0.0
        self._has_length = False
        self._in_body = False
        self._idle_since = 0.0
        self.was_received = False  # the server may have had the newest request

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Connect.

        Raises:
            OSError: it can't be connected.
        """
        self._wire = await open_wire(host, port, tls, self, self._clock)
        self._idle_since = self._clock()

    async def exchange(self, request: bytes, sink: BodySink) -> Response:
        """Send a whole request, at once, and return the head of its response when it has ended.

        Args:
            request: head and body.
            sink: is given each piece of a body with status 200 and the time at which it came, and
                each piece of any other.

        Raises:
            TransportError: the server hung up before the end, or what it sent isn't HTTP.
        """
        self.was_received = False
        if self._wire is None or self._wire.is_closed:
            raise TransportError("disconnected", "the server closed the connection")
        self._done = asyncio.get_running_loop().create_future()
        self._sink = sink
        self._wire.write(request)
        try:
            return await self._done
        finally:
            self._done = None
            self._sink = _ignore
            self._parser = httptools.HttpResponseParser(self)
            self._response = Response()
            self._has_length = self._in_body = False
            self._idle_since = self._clock()

    @property
    def is_open(self) -> bool:
        """Whether the server hasn't hung up."""
        return self._wire is not None and not self._wire.is_closed

    @property
    def is_reusable(self) -> bool:
        """Whether another request may be sent on it."""
        return self.is_open and self._clock() - self._idle_since < MAX_IDLE_SECONDS

    def close(self) -> None:
        """Drop the connection; what the server still sends is lost."""
        if self._wire is not None:
            self._wire.close()

    # the wire's side

    def data_received(self, data: bytes, now: float) -> None:
        """Keep the time, and parse."""
        self._now = now
        self.was_received = True
        if self._done is None:
            self.close()  # nobody asked: the next response would be taken for another's
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(TransportError("not_http", f"the server doesn't speak HTTP: {error}"))
            self.close()

    def connection_lost(self, error: OSError | None) -> None:
        """End what was under way; a body without a length ends with its connection."""
        # A reset may come before the word that the request has arrived.
        if error is not None or (self._wire is not None and self._wire.has_arrived()):
            self.was_received = True
        if self._in_body and not self._has_length:
            self._now = self._clock()
            self.on_message_complete()
        else:
            reason = f": {error}" if error is not None else ""
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
        if not self._parser.should_keep_alive():
            self.close()

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
        self._idle: list[Connection] = []  # the one used last is at the end
        self._connections: WeakSet[Connection] = WeakSet()
        key = f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        place = url.netloc.rpartition("@")[2]
        self._headers = f"Host: {place}\r\n{key}"
        self._origin = f"{url.scheme}://{place}{self._root}"

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the connections."""
        for connection in self._connections:
            connection.close()
        self._idle.clear()

    def url(self, path: str) -> str:
        """The whole URL of `path`, without a password."""
        return self._origin + path

    def get(self, path: str) -> bytes:
        """The request that GETs `path`, which begins with a slash."""
        return f"GET {self._root}{path} HTTP/1.1\r\n{self._headers}\r\n".encode("latin-1")

    def post(self, path: str, body: bytes) -> bytes:
        """The request that POSTs a JSON body."""
        head = f"POST {self._root}{path} HTTP/1.1\r\n{self._headers}"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode("latin-1") + body

    async def warm_up(self, count: int) -> None:
        """Open connections until `count` are idle, or the server takes no more.

        A few at a time: the queue of those that a server hasn't accepted may be short.
        """
        while (num_missing := count - len(self._idle)) > 0:
            attempts = (self._try_connect() for _ in range(min(num_missing, MAX_CONNECTING)))
            opened = [c for c in await asyncio.gather(*attempts) if c is not None]
            if not opened:
                return  # whoever sends is told why
            self._idle += opened

    async def reserve(self) -> Connection | None:
        """A connection for a request that is due soon: the idle one used last, else a new one.

        None if there is none to be had; `send` will say why.
        """
        idle = self._pop_idle()
        return idle if idle is not None else await self._try_connect()

    async def send(
        self, request: bytes, sink: BodySink, reserved: Connection | None = None
    ) -> Response:
        """Send a request and return the head of its response when that has ended.

        It goes over the `reserved` connection if that is still open, else over any other. If the
        server has closed a kept connection before it had the request, the request is sent again, on
        a new one; no request that the server has had is.

        Args:
            request: what `get` or `post` made.
            sink: as for `Connection.exchange`.
            reserved: what `reserve` returned.

        Raises:
            TransportError: as `Connection.exchange`, or the server can't be reached.
        """
        is_usable = reserved is not None and reserved.is_open
        connection = reserved if is_usable else self._pop_idle()
        if connection is not None:
            try:
                return await self._exchange(connection, request, sink)
            except TransportError:
                if connection.was_received:
                    raise
        return await self._exchange(await self._connect(), request, sink)

    async def _exchange(self, connection: Connection, request: bytes, sink: BodySink) -> Response:
        try:
            response = await connection.exchange(request, sink)
        except BaseException:
            connection.close()  # also when cancelled: the server then stops generating
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        return response

    def _pop_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
            connection.close()
        return None

    async def _try_connect(self) -> Connection | None:
        try:
            async with asyncio.timeout(MAX_CONNECT_SECONDS):
                return await self._connect()
        except (TransportError, TimeoutError):
            return None

    async def _connect(self) -> Connection:
        connection = Connection(self._clock)
        try:
            await connection.open(self._host, self._port, self._tls)
        except OSError as error:
            place = f"{self._host}:{self._port}"
            raise TransportError("unreachable", f"{place} can't be reached: {error}") from error
        self._connections.add(connection)
        return connection
