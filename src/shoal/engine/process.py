"""The engine in a process of its own, so that serving HTTP never waits for a step.

Started by `shoal.engine.connection`. It ends with its parent, however that ends, and leaves
SIGINT and SIGTERM to it: a terminal or a service manager sends them to both.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from shoal.config import ConfigError, EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.errors import EngineDeadError, describe, one_line
from shoal.engine.loading import load_engine
from shoal.engine.messages import (
    COMMANDS_SOCKET,
    EVENTS_SOCKET,
    AbortRequests,
    AddRequests,
    Advanced,
    Command,
    Died,
    EndInput,
    Event,
    Refused,
    ResetPrefixCache,
    Started,
    StartFailed,
    Stop,
    ViewBatch,
)
from shoal.model.errors import ModelError
from shoal.model.loader import open_model
from shoal.scheduler.interface import QueueFullError, RequestRejectedError

MAX_POLL_SECONDS = 3600.0  # a longer wait is asked for again; the system takes no more than 24 days

_logger = logging.getLogger(__name__)


class EngineServer:
    """Serves one engine over two sockets in `directory` until told to stop."""

    def __init__(self, directory: Path) -> None:
        context = zmq.Context()
        self._commands = context.socket(zmq.PULL)
        self._events = context.socket(zmq.PUSH)
        for endpoint in (self._commands, self._events):
            endpoint.set_hwm(0)  # a step never waits for a slow reader
        self._commands.bind(f"ipc://{directory / COMMANDS_SOCKET}")
        self._events.connect(f"ipc://{directory / EVENTS_SOCKET}")
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()

    def serve(self, config: EngineConfig) -> int:
        """Load the model, then serve; returns the exit code of the process."""
        gc.disable()  # what loading makes stays, and looking through it takes a third of the time
        try:
            core, info = load_engine(config, open_model(config.model))
        except (ConfigError, ModelError) as error:
            self._send(StartFailed(one_line(error)))
            return 1
        except Exception as error:
            _logger.critical("the engine could not start", exc_info=error)
            self._send(StartFailed(describe(error)))
            return 1
        gc.freeze()
        gc.enable()
        self._send(Started(info, core.stats()))
        try:
            self._loop(core)
        except EngineDeadError as error:
            _logger.critical("the engine has died", exc_info=error)
            self._send(Died(one_line(error)))
            return 1
        finally:
            core.close()
        return 0

    def close(self) -> None:
        """Close the sockets once everything has been sent."""
        self._commands.close()
        self._events.close(linger=1000)

    def _loop(self, core: EngineCore) -> None:
        stats = core.stats()
        while True:
            wait = core.seconds_to_wait if core.has_work() else math.inf
            commands = self._receive(wait)
            turn = Advanced(stats)
            for command in commands:
                if isinstance(command, Stop):
                    return
                _obey(core, command, turn)
            if core.has_work():
                turn.outputs.extend(core.step())
            if views := [command for command in commands if isinstance(command, ViewBatch)]:
                turn.batch = core.view_batch(views[-1].max_waiting)
            turn.stats = stats = core.stats()
            self._send(turn)

    def _receive(self, wait: float) -> list[Command]:
        """The commands that have come; waits up to `wait` seconds for the first."""
        timeout = None if math.isinf(wait) else math.ceil(min(wait, MAX_POLL_SECONDS) * 1000)
        commands = []
        while self._commands.poll(timeout):
            commands.append(self._decoder.decode(self._commands.recv()))
            timeout = 0
        return commands

    def _send(self, event: Event) -> None:
        self._events.send(self._encoder.encode(event))


def _obey(core: EngineCore, command: Command, turn: Advanced) -> None:
    """Carry out a command; what is to be said about it goes into `turn`."""
    match command:
        case AddRequests():
            try:
                core.add(command.requests)
            except RequestRejectedError as error:
                turn.refused.append(Refused(command.request_id, str(error)))
            except QueueFullError as error:
                turn.refused.append(Refused(command.request_id, str(error), error.retry_after))
        case AbortRequests():
            core.abort(command.request_ids, command.reason)
        case EndInput():
            core.end_input()
        case ResetPrefixCache():
            turn.num_blocks_reset.append(core.reset_prefix_cache())


def _exit_with_parent(lifeline: socket.socket) -> None:
    """Wait until the parent's end of the lifeline is closed, which its death does too."""
    lifeline.recv(1)
    os._exit(1)


def main() -> None:
    """Run the process: `python -m shoal.engine.process DIRECTORY LIFELINE_FD CONFIG_JSON`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    directory, lifeline_fd, config_json = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s engine: %(message)s")
    lifeline = socket.socket(fileno=int(lifeline_fd))
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    server = EngineServer(Path(directory))
    exit_code = server.serve(msgspec.json.decode(config_json, type=EngineConfig))
    server.close()
    sys.exit(exit_code)


if __name__ == "__main__":
    main()
