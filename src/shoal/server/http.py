"""The application in uvicorn. All that takes long to import is imported from here."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import uvicorn
from prometheus_client import disable_created_metrics
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.server.app import create_app
from shoal.server.state import ServerState

STOP_GRACE_SECONDS = 2  # for the last words to the clients when the server stops now

# Else each counter has a gauge beside it that nobody asked for.
disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the launcher has its own."""

    def __init__(self, state: ServerState) -> None:
        super().__init__(
            uvicorn.Config(
                create_app(state),
                loop="none",
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=STOP_GRACE_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield


class _Protocol(HttpToolsProtocol):
    """uvicorn's, which also notes when a request's first bytes came: its latencies begin there."""

    def on_message_begin(self) -> None:
        """Keep the time for the middleware, which runs some tenths of a millisecond later."""
        super().on_message_begin()
        self.scope["state"]["received"] = time.monotonic()
