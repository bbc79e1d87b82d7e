import asyncio
import socket
import struct
import threading
import time

import pytest

from shoal.bench.client import connection
from shoal.bench.client.connection import HttpClient, TransportError
from shoal.config import ConfigError


async def serve(*answers):
    """A server that gives each connection the next answer, then hangs up."""
    waiting = list(answers)
    heads = []

    async def answer(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(waiting.pop(0))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


async def get(client, path="/x"):
    body = bytearray()
    response = await client.send(client.get(path), lambda piece, _now: body.extend(piece))
    return response.status, bytes(body)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
    ],
)
async def test_a_body_is_read_however_its_end_is_told(answer):
    url, _ = await serve(answer)
    async with HttpClient(url) as client:
        assert await get(client) == (200, b"hello")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello", "disconnected"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n", "disconnected"),
        (b"SSH-2.0-OpenSSH\r\n", "not_http"),
    ],
)
async def test_an_answer_that_breaks_off_or_is_no_http_is_an_error(answer, kind):
    url, _ = await serve(answer)
    async with HttpClient(url) as client:
        with pytest.raises(TransportError) as caught:
            await get(client)
    assert caught.value.kind == kind


async def test_a_connection_that_the_server_closed_is_not_used_again():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    url, heads = await serve(answer, answer)
    async with HttpClient(url) as client:
        assert await get(client) == (200, b"ok")
        await asyncio.sleep(0.05)
        assert await get(client) == (200, b"ok")
    assert len(heads) == 2


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class BlockingServer:
    """A server in a thread of its own, so that it acts while the client's event loop is blocked.

    Every connection gets one answer; `after` is what becomes of it then.
    """

    def __init__(self, after):
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._after = after
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_requests = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            connection, _ = self._listener.accept()
            self.read(connection)
            connection.sendall(OK)
            self._after(self, connection)

    def read(self, connection):
        connection.recv(65536)
        self.num_requests += 1


def hang_up(_server, connection):
    connection.close()


def hang_up_after_reading(server, connection):
    server.read(connection)
    connection.close()


def reset_after_reading(server, connection):
    server.read(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def test_a_request_is_sent_again_if_the_server_had_closed_the_idle_connection():
    server = BlockingServer(after=hang_up)
    async with HttpClient(server.url) as client:
        assert await get(client) == (200, b"ok")
        time.sleep(0.1)  # the end comes, and the event loop doesn't know
        assert await get(client) == (200, b"ok")
    assert server.num_requests == 2


@pytest.mark.parametrize("after", [hang_up_after_reading, reset_after_reading])
async def test_a_request_that_the_server_has_had_is_not_sent_again(after):
    server = BlockingServer(after)
    async with HttpClient(server.url) as client:
        assert await get(client) == (200, b"ok")
        with pytest.raises(TransportError) as caught:
            await get(client)
    assert caught.value.kind == "disconnected"
    assert server.num_requests == 2


async def test_a_reserved_connection_is_the_one_that_is_used():
    url, heads = await serve(OK, OK)
    async with HttpClient(url) as client:
        first, second = [await client.reserve() for _ in range(2)]
        for reserved in (second, first):
            response = await client.send(client.get("/x"), lambda *_: None, reserved)
            assert response.status == 200
            await asyncio.sleep(0.05)
            assert not reserved.is_open
    assert len(heads) == 2


async def test_a_reserved_connection_that_the_server_closes_is_replaced():
    num_connections = 0

    async def answer(reader, writer):
        nonlocal num_connections
        num_connections += 1
        if num_connections > 1:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with HttpClient(url) as client:
        reserved = await client.reserve()
        await asyncio.sleep(0.05)
        assert not reserved.is_open
        response = await client.send(client.get("/x"), lambda *_: None, reserved)
    assert response.status == 200
    assert num_connections == 2


async def test_connections_are_opened_ahead_and_then_used():
    num_connections = 0

    async def answer(reader, writer):
        nonlocal num_connections
        num_connections += 1
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.02)
        writer.write(OK)

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with HttpClient(url) as client:
        await client.warm_up(20)
        await client.warm_up(19)
        await asyncio.sleep(0.1)  # the server has to accept them
        assert num_connections == 20
        await asyncio.gather(*(get(client) for _ in range(20)))
        assert num_connections == 20


async def test_a_server_that_is_not_there_is_told_by_the_request_and_not_before():
    async with HttpClient("http://127.0.0.1:1") as client:
        await client.warm_up(3)
        assert await client.reserve() is None
        with pytest.raises(TransportError) as caught:
            await get(client)
    assert caught.value.kind == "unreachable"


async def test_a_request_whose_answer_has_begun_is_not_sent_again():
    num_requests = 0

    async def answer(reader, writer):
        nonlocal num_requests
        while await reader.readuntil(b"\r\n\r\n"):
            num_requests += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\no")
            if num_requests == 2:
                writer.close()
                return
            writer.write(b"k")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with HttpClient(url) as client:
        assert await get(client) == (200, b"ok")
        with pytest.raises(TransportError):
            await get(client)
    assert num_requests == 2


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch):
    """The server may be about to close it."""
    num_connections = 0

    async def answer(reader, writer):
        nonlocal num_connections
        num_connections += 1
        while await reader.readuntil(b"\r\n\r\n"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with HttpClient(url) as client:
        for expected in (1, 1):
            await get(client)
            assert num_connections == expected
        monkeypatch.setattr(connection, "MAX_IDLE_SECONDS", 0.0)
        await get(client)
        assert num_connections == 2


async def test_a_server_that_is_not_there_is_named():
    async with HttpClient("http://127.0.0.1:1") as client:
        with pytest.raises(TransportError, match=r"127\.0\.0\.1:1 can't be reached"):
            await get(client)


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_url_may_end_with_v1(suffix):
    url, heads = await serve(b"HTTP/1.1 204 No Content\r\n\r\n")
    async with HttpClient(f"{url}{suffix}", api_key="secret") as client:
        assert await get(client, "/v1/models") == (204, b"")
    head = heads[0].decode()
    assert head.startswith("GET /v1/models HTTP/1.1\r\n")
    assert f"Host: {url.removeprefix('http://')}\r\n" in head
    assert "Authorization: Bearer secret\r\n" in head


async def test_a_server_without_tls_under_https_is_an_error():
    async def answer(_reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with HttpClient(f"https://127.0.0.1:{port}") as client:
        with pytest.raises(TransportError) as caught:
            await get(client)
    assert caught.value.kind == "unreachable"


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://x", "http://", "http://x:y", "http://ä"]
)
def test_a_wrong_url_is_refused(url):
    with pytest.raises(ConfigError, match="base_url"):
        HttpClient(url)


def test_a_key_that_no_header_can_carry_is_refused():
    with pytest.raises(ConfigError, match="api_key"):
        HttpClient("http://localhost", api_key="a\r\nX-Evil: 1")
