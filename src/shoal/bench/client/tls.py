"""TLS for a stream whose bytes somebody else sends and receives."""

from __future__ import annotations

import asyncio
import socket
import ssl

READ_SIZE = 65536


class TlsSession:
    """The client's side of one session; turns text into what is sent, and what comes into text.

    Args:
        context: what is trusted.
        host: the name that the server has to prove.
    """

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self.has_ended = False  # the server has said that it sends nothing more

    async def shake_hands(self, sock: socket.socket) -> None:
        """Begin the session over a connected, non-blocking socket.

        Raises:
            OSError: the server hangs up, speaks no TLS, or can't prove its name.
        """
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._session.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(sock, self.pending())
            else:
                await loop.sock_sendall(sock, self.pending())
                return
            data = await loop.sock_recv(sock, READ_SIZE)
            if not data:
                raise ConnectionResetError("the server hung up during the TLS handshake")
            self._incoming.write(data)

    def encrypt(self, text: bytes) -> bytes:
        """What to send for `text`."""
        self._session.write(text)
        return self.pending()

    def decrypt(self, data: bytes) -> bytes:
        """The text in `data` and what came before, as far as its records are complete.

        Raises:
            OSError: the data isn't of this session.
        """
        self._incoming.write(data)
        parts: list[bytes] = []
        try:
            while part := self._session.read(READ_SIZE):
                parts.append(part)
            self.has_ended = True
        except ssl.SSLWantReadError:
            pass  # the next record is incomplete
        return b"".join(parts)

    def pending(self) -> bytes:
        """What the session itself has to send."""
        return self._outgoing.read()
