"""What comes over a connection, and when: over real sockets, with and without TLS."""

import asyncio
import socket
import ssl
import subprocess
import threading
import time

import pytest

from shoal.bench.client import wire
from shoal.bench.client.wire import open_wire


class Inbox:
    """Keeps what comes, and tells when the connection has ended."""

    def __init__(self):
        self.pieces = []
        self.ended = asyncio.Event()
        self.has_piece = asyncio.Event()
        self.error = None
        self.stream = None  # set where it matters what has arrived
        self.had_all = None

    def data_received(self, data, now):
        self.pieces.append((data, now))
        self.has_piece.set()

    def connection_lost(self, error):
        self.error = error
        if self.stream is not None:
            self.had_all = self.stream.has_arrived()
        self.ended.set()

    @property
    def data(self):
        return b"".join(data for data, _ in self.pieces)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The paths of a certificate for this machine, and of its key."""
    directory = tmp_path_factory.mktemp("tls")
    paths = directory / "certificate.pem", directory / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
    command += " -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        [*command.split(), "-out", paths[0], "-keyout", paths[1]], check=True, capture_output=True
    )
    return paths


@pytest.fixture(params=["plain", "tls"])
def contexts(request):
    """Of the server and of the client; none for plain connections."""
    if request.param == "plain":
        return None, None
    certificate, key = request.getfixturevalue("certificate")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


async def connected(contexts, answer):
    """A wire to a server that gives each connection to `answer(reader, writer)`; what comes."""
    server_context, client_context = contexts
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=server_context)
    inbox = Inbox()
    port = server.sockets[0].getsockname()[1]
    return await open_wire("localhost", port, client_context, inbox, time.monotonic), inbox


async def test_what_is_written_arrives_and_what_comes_back_is_told(contexts):
    async def echo(reader, writer):
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    sent = bytes(range(256)) * 40_000  # 10 MB: more than the system takes at once
    stream, inbox = await connected(contexts, echo)
    stream.write(sent[:-3])
    stream.write(sent[-3:])
    while len(inbox.data) < len(sent):
        inbox.has_piece.clear()
        await inbox.has_piece.wait()
    assert inbox.data == sent
    assert stream.has_arrived()
    stream.close()
    assert stream.is_closed


async def test_the_end_of_a_connection_is_told_after_all_that_came(contexts):
    async def answer(reader, writer):
        writer.write(b"x" * 300_000)
        writer.close()

    stream, inbox = await connected(contexts, answer)
    await inbox.ended.wait()
    assert inbox.data == b"x" * 300_000
    assert inbox.error is None
    assert stream.is_closed
    stream.close()  # again, which is nothing


async def test_a_connection_that_is_reset_is_told_with_the_reason(contexts):
    async def answer(reader, writer):
        writer.transport.abort()

    stream, inbox = await connected(contexts, answer)
    stream.write(b"x")
    await inbox.ended.wait()
    assert stream.is_closed


class SendingThread:
    """Sends a piece from another thread, so that it comes while the event loop is blocked."""

    def __init__(self):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.go = threading.Event()
        self.sent = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        connection, _ = self._listener.accept()
        self.go.wait()
        self.sent = time.monotonic()
        connection.sendall(b"piece")


async def age_of_piece(blocked):
    """Has a piece sent while the event loop is blocked; returns how late it was said to come."""
    sender, inbox = SendingThread(), Inbox()
    stream = await open_wire("127.0.0.1", sender.port, None, inbox, time.monotonic)
    await asyncio.sleep(0.1)  # the system begins to note times a little later
    sender.go.set()
    time.sleep(blocked)
    await inbox.has_piece.wait()
    stream.close()
    ((_, came),) = inbox.pieces
    return came - sender.sent


async def test_a_piece_that_waited_to_be_read_has_the_time_at_which_it_came():
    assert 0.0 <= await age_of_piece(blocked=0.4) < 0.2


@pytest.mark.parametrize("step", [-3600, 3600])
async def test_a_wall_clock_that_is_set_meanwhile_is_not_believed(monkeypatch, step):
    real = time.time_ns
    monkeypatch.setattr(wire.time, "time_ns", lambda: real() + step * 10**9)
    assert 0.2 <= await age_of_piece(blocked=0.2) < 10.0  # the time of reading


async def test_what_the_other_side_took_is_told_apart_from_what_it_can_never_have_had():
    closed = threading.Event()

    def close_at_once(listener):
        connection, _ = listener.accept()
        connection.close()
        closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=close_at_once, args=(listener,)).start()
        inbox = Inbox()
        stream = await open_wire(
            "127.0.0.1", listener.getsockname()[1], None, inbox, time.monotonic
        )
        closed.wait()  # and the event loop has not been told
        arrived = []
        inbox.connection_lost = lambda _error: (
            arrived.append(stream.has_arrived()),
            inbox.ended.set(),
        )
        stream.write(b"request")
        await inbox.ended.wait()
    assert arrived == [False]


async def test_a_server_that_is_not_who_it_should_be_is_an_error(certificate):
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(*certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        await connected((server, ssl.create_default_context()), lambda *_: None)


async def test_a_server_that_hangs_up_during_the_handshake_is_an_error():
    async def hang_up(_reader, writer):
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(OSError, match=r"hung up|reset"):
        await open_wire("127.0.0.1", port, ssl.create_default_context(), Inbox(), time.monotonic)
