"""Starts the engine's process and talks to it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from shoal.config import EngineConfig
from shoal.engine.errors import EngineDeadError
from shoal.engine.messages import COMMANDS_SOCKET, EVENTS_SOCKET, Command, Event, Stop

_LAST_WORDS_SECONDS = 0.2
"""How long after the process has ended an event of its may still be on its way."""

_STOP_SECONDS = 2.0
"""How long the process may take to end when told to: it finishes its step first."""


class EngineConnection:
    """An engine process and the sockets to it; owned by the running event loop.

    The sockets lie in a directory that only this user can enter. The lifeline is a pair of
    connected sockets, one on each side, that carry nothing: when one side dies the system closes
    its end, and the other side notices.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="shoal-")
        self._context = zmq.Context()
        self._commands = self._context.socket(zmq.PUSH)
        self._events = zmq.asyncio.Socket(self._context, zmq.PULL)
        for endpoint in (self._commands, self._events):
            endpoint.set_hwm(0)
        self._events.bind(f"ipc://{Path(self._directory.name) / EVENTS_SOCKET}")
        # Connecting, unlike binding, queues what is sent before the other side is there.
        self._commands.connect(f"ipc://{Path(self._directory.name) / COMMANDS_SOCKET}")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Event)

        self._lifeline, child_lifeline = socket.socketpair()
        self._lifeline.setblocking(False)
        with child_lifeline:
            self._process = _spawn(config, self._directory.name, child_lifeline)
        loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._lifeline, self._on_end)

    def send(self, command: Command) -> None:
        """Send a command; returns at once."""
        self._commands.send(self._encoder.encode(command))

    async def receive(self) -> Event:
        """The next event.

        Raises:
            EngineDeadError: the process has ended and all its events have been received.
        """
        message: asyncio.Future[bytes] = asyncio.ensure_future(self._events.recv())
        either: set[asyncio.Future[Any]] = {message, self._ended}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not message.done():
            await asyncio.wait({message}, timeout=_LAST_WORDS_SECONDS)
        if not message.done():
            message.cancel()
            exit_code = await asyncio.to_thread(self._process.wait)
            raise EngineDeadError(f"the engine process has ended with exit code {exit_code}")
        return self._decoder.decode(message.result())

    async def close(self) -> None:
        """End the process, by force if it takes longer than `_STOP_SECONDS`."""
        self.send(Stop())
        await asyncio.wait({self._ended}, timeout=_STOP_SECONDS)
        self._process.kill()
        await asyncio.to_thread(self._process.wait)
        self._on_end()
        self._lifeline.close()
        self._commands.close(linger=0)
        self._events.close(linger=0)
        self._context.term()
        self._directory.cleanup()

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._lifeline)
        if not self._ended.done():
            self._ended.set_result(None)


def _spawn(
    config: EngineConfig, directory: str, lifeline: socket.socket
) -> subprocess.Popen[bytes]:
    # A fresh interpreter rather than multiprocessing: it doesn't run the caller's main module.
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "shoal.engine.process"),
            *(directory, str(lifeline.fileno()), msgspec.json.encode(config).decode()),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=(lifeline.fileno(),),
    )
