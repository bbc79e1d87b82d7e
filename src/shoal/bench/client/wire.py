"""The bytes of a TCP connection, each piece with the time at which it came to this machine.

Where the server runs on the same CPUs, this process may get to read milliseconds after an answer
has come. Linux notes the time of each packet, so that this wait is in no figure.
"""

from __future__ import annotations

import asyncio
import fcntl
import socket
import ssl
import struct
import termios
import time
from collections.abc import Sequence
from typing import Protocol

from shoal.bench.client.timer import Clock
from shoal.bench.client.tls import READ_SIZE, TlsSession

_SO_TIMESTAMPNS = 35  # Linux; the socket module has no name for it
_TIMESTAMP = struct.Struct("@ll")  # seconds and nanoseconds of the wall clock
_ANCILLARY_SIZE = socket.CMSG_SPACE(_TIMESTAMP.size)

_Ancillary = Sequence[tuple[int, int, bytes]]


class Receiver(Protocol):
    """Who is told of what comes."""

    def data_received(self, data: bytes, now: float) -> None:
        """Take a piece that came at `now`."""

    def connection_lost(self, error: OSError | None) -> None:
        """The other side has ended the connection, in order if `error` is None."""


class Wire:
    """A connected stream; made by `open_wire`.

    Args:
        sock: connected, non-blocking, and owned from now on.
        tls: the session over it, for https.
        receiver: who is told of what comes.
        clock: seconds on a monotonic clock.
    """

    def __init__(
        self, sock: socket.socket, tls: TlsSession | None, receiver: Receiver, clock: Clock
    ) -> None:
        self._socket = sock
        self._tls = tls
        self._receiver = receiver
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._last_time = clock()  # nothing that comes can have come before
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._loop.add_reader(sock, self._on_readable)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._socket.fileno() < 0

    def write(self, data: bytes) -> None:
        """Send `data`, now as far as the system takes it."""
        self._last_time = self._clock()
        self._send(data if self._tls is None else self._tls.encrypt(data))

    def has_arrived(self) -> bool:
        """Whether the other side's system has acknowledged all that was sent."""
        unacknowledged = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
        return not self._unsent and unacknowledged == bytes(4)

    def close(self) -> None:
        """Drop the connection; what the other side still sends is lost."""
        if self.is_closed:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()

    def _send(self, data: bytes) -> None:
        """Send, after what waits to be sent."""
        if self._unsent:
            self._unsent += data
            return
        try:
            num_sent = self._socket.send(data)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            self._unsent += data  # never to be sent; the reader is told why
            return
        if num_sent < len(data):
            self._unsent += data[num_sent:]
            self._loop.add_writer(self._socket, self._on_writable)

    def _on_writable(self) -> None:
        data = bytes(self._unsent)
        self._unsent.clear()
        self._loop.remove_writer(self._socket)
        self._send(data)

    def _on_readable(self) -> None:
        try:
            data, ancillary, _, _ = self._socket.recvmsg(READ_SIZE, _ANCILLARY_SIZE)
            now = self._time_of(ancillary)
            content = data if self._tls is None else self._decrypt(self._tls, data)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(error)
            return
        if content:
            self._receiver.data_received(content, now)
        if not data or (self._tls is not None and self._tls.has_ended):
            self._lose(None)

    def _decrypt(self, tls: TlsSession, data: bytes) -> bytes:
        """The text in `data`; what TLS itself has to say to it is sent."""
        content = tls.decrypt(data)
        if reply := tls.pending():
            self._send(reply)
        return content

    def _lose(self, error: OSError | None) -> None:
        if not self.is_closed:  # else the receiver has closed it, and knows
            self._receiver.connection_lost(error)
            self.close()

    def _time_of(self, ancillary: _Ancillary) -> float:
        """When a piece came; when it was read, where the system doesn't tell."""
        now = self._clock()
        for level, kind, data in ancillary:
            if (level, kind) != (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                continue
            seconds, nanoseconds = _TIMESTAMP.unpack(data)
            waited = (time.time_ns() - seconds * 10**9 - nanoseconds) * 1e-9
            if 0 <= waited <= now - self._last_time:  # else the wall clock has been set meanwhile
                now -= waited
        self._last_time = now
        return now


async def open_wire(
    host: str, port: int, tls: ssl.SSLContext | None, receiver: Receiver, clock: Clock
) -> Wire:
    """Connect to the first address of `host` that answers.

    Raises:
        OSError: none does, the name has none, or TLS can't be agreed on.
    """
    sock = await _connect(host, port)
    session = None
    try:
        if tls is not None:
            session = TlsSession(tls, host)
            await session.shake_hands(sock)
        return Wire(sock, session, receiver, clock)
    except BaseException:
        sock.close()
        raise


async def _connect(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in await loop.getaddrinfo(
        host, port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, address)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure
