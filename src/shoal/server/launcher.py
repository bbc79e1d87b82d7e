"""Runs the server process: port, engine, HTTP, signals, and the way down again."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import importlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import uvloop

from shoal.config import EngineConfig
from shoal.engine.client import AsyncEngine
from shoal.engine.loading import model_name
from shoal.server.config import ServerConfig, ServerStartError

if TYPE_CHECKING:
    from shoal.server.state import ServerState

LISTEN_BACKLOG = 2048

logger = logging.getLogger(__name__)


def bind(config: ServerConfig) -> socket.socket:
    """Listen on the configured address.

    The socket listens at once: from here on no second server can take the port, as it could while
    the port is only bound, and early clients wait in the backlog.

    Raises:
        ServerStartError: the address can't be had; the message says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ServerStartError(f"cannot resolve the host '{config.host}': {error}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        # A port that a former server left in TIME_WAIT may be used again; sharing it with a
        # running one would need SO_REUSEPORT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(LISTEN_BACKLOG)
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        if error.errno == errno.EADDRINUSE:
            raise ServerStartError(
                f"cannot listen on {where}: the port is in use by another program; "
                "stop it or choose another --port"
            ) from error
        raise ServerStartError(f"cannot listen on {where}: {error.strerror}") from error
    return listener


def serve(engine_config: EngineConfig, config: ServerConfig, listener: socket.socket) -> None:
    """Serve until a signal or a failure ends it; returns after a clean shutdown.

    Raises:
        EngineStartError: the model could not be loaded.
    """
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if config.log_level != "debug":
        logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its INFO repeats what we say
    # Nobody here multiplies with NumPy, whose threads would wait for work with a core each while
    # the model is loaded. The engine's process inherits it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    gc.disable()  # until the model is loaded: what is made until then stays
    uvloop.run(_serve(engine_config, config, listener))


async def _serve(
    engine_config: EngineConfig, config: ServerConfig, listener: socket.socket
) -> None:
    engine_config = engine_config.for_serving()
    engine = AsyncEngine(engine_config)
    loading = asyncio.create_task(engine.start())
    # These imports take as long as loading the model. In a thread they let the loop start the
    # engine's process meanwhile.
    await asyncio.to_thread(importlib.import_module, "shoal.server.http")
    from shoal.server.http import HttpServer  # noqa: PLC0415 - slow
    from shoal.server.state import ServerState  # noqa: PLC0415 - slow

    names = config.served_model_name or (model_name(engine_config.model),)
    state = ServerState(engine=engine, model_names=names, api_key=config.api_key)
    http = HttpServer(state)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    with _shutdown_signals() as (shutdown, stop_now):
        try:
            if await _loaded(loading, shutdown):
                gc.freeze()
                gc.enable()
                _print_banner(engine, engine_config, names, listener)
                await shutdown.wait()
                state.draining = True
                engine.end_input()
                await _drain(state, config.shutdown_timeout, stop_now)
        finally:
            state.stop_now()
            http.should_exit = True
            await serving
            await engine.close()


async def _loaded(loading: asyncio.Task[None], shutdown: asyncio.Event) -> bool:
    """Wait for the model; False when a signal came first."""
    interrupted = asyncio.create_task(shutdown.wait())
    try:
        await asyncio.wait({loading, interrupted}, return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return False
        await loading
        return True
    finally:
        interrupted.cancel()
        loading.cancel()
        await asyncio.gather(loading, interrupted, return_exceptions=True)


def _print_banner(
    engine: AsyncEngine, config: EngineConfig, names: Sequence[str], listener: socket.socket
) -> None:
    """Tell on stdout what is served, how and where."""
    info = engine.info
    threads = "set by --num-threads" if config.num_threads else "from affinity and cgroup quota"
    tokens = info.num_blocks * info.block_size
    print(
        f"model      {', '.join(names)} ({info.max_model_len} tokens of context)\n"
        f"strategy   {config.scheduler}, at most {_batch_limits(config)}\n"
        f"threads    {info.num_threads} ({threads}), {info.isa}\n"
        f"KV pool    {info.num_blocks} blocks of {info.block_size}: {tokens} tokens\n"
        f"URL        {_url(listener)}\n"
        "ready",
        flush=True,
    )


def _batch_limits(config: EngineConfig) -> str:
    sequences = f"{config.max_num_seqs} sequences"
    match config.scheduler:
        case "continuous":
            return f"{sequences} and {config.token_budget} tokens a step"
        case "static":
            return f"{sequences} a batch, which waits {config.queue_delay:g} s to fill"
        case "dynamic":
            return (
                f"{sequences} and {config.token_budget} prompt tokens a batch, "
                f"which waits {config.queue_delay:g} s to fill"
            )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _drain(state: ServerState, timeout: float, stop_now: asyncio.Event) -> None:
    """Let running requests finish, at most `timeout` seconds and until `stop_now`."""
    logger.info("shutting down; running requests get %g s, a second signal stops now", timeout)
    idle = asyncio.create_task(state.wait_until_idle())
    stopped = asyncio.create_task(stop_now.wait())
    await asyncio.wait({idle, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    if not idle.done():
        logger.warning("requests that have not finished are dropped")
    idle.cancel()
    stopped.cancel()


@contextlib.contextmanager
def _shutdown_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Events that SIGTERM or SIGINT set: the first signal the first, the second the second."""
    shutdown, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if shutdown.is_set() else shutdown).set()

    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield shutdown, stop_now
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
