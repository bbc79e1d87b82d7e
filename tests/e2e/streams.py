"""Requests that go on in the background: streams read by a thread, and connections left open."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
from server_process import ServerProcess, until

COMPLETIONS = "/v1/completions"


class Stream(threading.Thread):
    """Reads a streamed completion to its end in a thread."""

    def __init__(self, url: str, body: dict[str, Any], *, num_events: int = 4) -> None:
        super().__init__()
        self._url = url
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        self.lines: list[str] = []
        self.start()
        until(lambda: len(self.lines) >= num_events or not self.is_alive())

    def run(self) -> None:
        with httpx.stream("POST", self._url + COMPLETIONS, json=self._body, timeout=120) as r:
            # Not iter_lines, which also ends lines at characters that answers may hold.
            rest = b""
            for chunk in r.iter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                self.lines += (line.decode() for line in lines if line)

    @property
    def has_finished(self) -> bool:
        """Whether the stream came to its normal end."""
        return self.lines[-1] == "data: [DONE]"

    @property
    def has_ended(self) -> bool:
        """Whether its last token has come."""
        return any(choice["finish_reason"] for choice in self.choices)

    @property
    def has_error(self) -> bool:
        """Whether the stream's last event is an error."""
        return '"error"' in self.lines[-1]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events that have come."""
        data = [line.removeprefix("data: ") for line in list(self.lines)]
        return [json.loads(event) for event in data if event != "[DONE]"]

    @property
    def choices(self) -> list[dict[str, Any]]:
        """The pieces of the one choice."""
        return [choice for event in self.events for choice in event.get("choices", ())]

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(choice["text"] for choice in self.choices)


def post_and_leave_open(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    """Send a completion's request without reading the answer; closing the socket hangs up."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(_request(body))
    return connection


def _request(body: dict[str, Any], headers: str = "") -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


async def post_alone(server: ServerProcess, body: dict[str, Any]) -> httpx.Response:
    """Post a completion on a connection of its own; for hundreds at once, where httpx is slow."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=2**20)
    try:
        writer.write(_request(body, "Connection: close\r\n"))
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.transport.abort()
    status, *lines = head.decode().split("\r\n")
    headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
    return httpx.Response(int(status.split()[1]), headers=headers, content=content)


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make the calls in a thread each; their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [future.result() for future in futures]
