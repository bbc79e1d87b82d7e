"""What `shoal bench serve` costs itself: its share of a core while a mock server streams to it.

The mock runs in a process of its own and sends each token as an event of its own, in the bytes of
Shoal's server, so that nothing but the load generator is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import httptools
import msgspec
import uvloop

from shoal.bench.results.machine import Machine

EVENT = (
    b'{"id":"cmpl-5b0e6ad1c4f34b0c8a5c7d0f","created":1700000000,"model":"mock","choices":'
    b'[{"index":0,"text":" word","logprobs":null,"finish_reason":%s,"stop_reason":null}],'
    b'"object":"text_completion","usage":null}'
)
USAGE = (
    b'{"id":"cmpl-5b0e6ad1c4f34b0c8a5c7d0f","created":1700000000,"model":"mock","choices":[],'
    b'"object":"text_completion","usage":{"prompt_tokens":%d,"completion_tokens":%d,'
    b'"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":0}}}'
)
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
    b"connection: keep-alive\r\n\r\n"
)


def chunk(event: bytes) -> bytes:
    """A server-sent event as a chunk of an HTTP body."""
    event = b"data: " + event + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


TOKEN, LAST_TOKEN = chunk(EVENT % b"null"), chunk(EVENT % b'"length"')
END = chunk(b"[DONE]") + b"0\r\n\r\n"


class MockConnection(asyncio.Protocol):
    """Answers each request with a token every `interval` seconds."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport):
        self._transport = transport

    def data_received(self, data):
        self._parser.feed_data(data)

    def on_message_begin(self):
        self._body = b""

    def on_url(self, url):
        self._url = url

    def on_body(self, body):
        self._body += body

    def on_message_complete(self):
        if self._url != b"/v1/completions":
            self._transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            return
        self._request = msgspec.json.decode(self._body)
        self._num_sent = 0
        self._next = self._loop.time()
        self._transport.write(HEAD)
        self._send()

    def _send(self):
        wanted = self._request["max_tokens"]
        self._num_sent += 1
        if self._num_sent < wanted:
            self._transport.write(TOKEN)
            self._next += self._interval
            self._loop.call_at(self._next, self._send)
            return
        num_input = len(self._request["prompt"].split())
        usage = chunk(USAGE % (num_input, wanted, num_input + wanted))
        self._transport.write(LAST_TOKEN + usage + END)


def run_mock(listener: socket.socket, interval: float) -> None:
    """Serve until the process is ended."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: MockConnection(interval), sock=listener)
        await server.serve_forever()

    uvloop.run(serve())


def measure(base_url: str, concurrency: int, num_requests: int, num_tokens: int) -> dict:
    """The figures of one run of the load generator."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        command = [sys.executable, "-m", "shoal.cli", "bench", "serve", "--base-url", base_url]
        command += ["--model", "mock", "--concurrency", str(concurrency)]
        command += ["--num-requests", str(num_requests), "--output-len", str(num_tokens)]
        subprocess.run([*command, "--json", str(path)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())["figures"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rate", type=float, default=2000.0, help="tokens a second in all")
    parser.add_argument("--concurrency", type=int, default=64, help="connections")
    parser.add_argument("--num-tokens", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="answers on each connection")
    arguments = parser.parse_args()

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    interval = arguments.concurrency / arguments.rate
    mock = multiprocessing.get_context("spawn").Process(
        target=run_mock, args=(listener, interval), daemon=True
    )
    mock.start()
    figures = measure(
        f"http://127.0.0.1:{listener.getsockname()[1]}",
        arguments.concurrency,
        arguments.concurrency * arguments.rounds,
        arguments.num_tokens,
    )
    mock.terminate()
    names = ("output_tokens_per_second", "requests_in_flight_mean", "load_generator_cpu_share")
    result = {name: figures[name] for name in (*names, "itl_p50_ms", "itl_p99_ms")}
    print(json.dumps({"machine": asdict(Machine.this()), **result}, indent=2))


if __name__ == "__main__":
    main()
