"""Few servers, each shared by all tests that can live with its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from gguf_files import TinyModel, write_tiny_model
from server_process import POISON, ServerProcess, faults, running, until
from small_pool import SMALL_POOL_MIB

API_KEY = "secret"


@pytest.fixture(scope="session")
def server(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The real model with room for a few requests at once."""
    directory = tmp_path_factory.mktemp("server")
    arguments = ("--max-num-seqs", "8", "--kv-cache-memory-mib", "512")
    with running(directory, str(model_path), *arguments) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    """A client of the real model's server; afterwards nothing may be left in the engine."""
    with server.client() as client:
        yield client
    # The engine frees blocks within a step; the snapshot follows with the next one.
    until(server.is_idle)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a context that takes seconds to fill."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_tiny_model(path, TinyModel(context_length=32768))


@pytest.fixture(scope="session")
def guarded_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A context of 64 tokens, two names and an API key."""
    names = ("--served-model-name", "first", "--served-model-name", "second")
    arguments = ("--max-model-len", "64", "--api-key", API_KEY, *names)
    with running(tmp_path_factory.mktemp("guarded"), str(tiny_model), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def small_pool_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A KV pool that is smaller than the context."""
    directory = tmp_path_factory.mktemp("small_pool")
    pool = ("--kv-cache-memory-mib", str(SMALL_POOL_MIB))
    with running(directory, str(tiny_model), *pool) as server:
        yield server


@pytest.fixture(scope="session")
def tiny_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Many seats, and otherwise what there is by default."""
    directory = tmp_path_factory.mktemp("many_seats")
    with running(directory, str(tiny_model), "--max-num-seqs", "64") as server:
        yield server


@pytest.fixture(scope="session")
def small_step_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Steps of 16 tokens, 8 seats and 100 places in the queue."""
    steps = ("--max-num-batched-tokens", "16", "--max-num-seqs", "8")
    limits = (*steps, "--max-waiting-requests", "100")
    with running(tmp_path_factory.mktemp("small_steps"), str(tiny_model), *limits) as server:
        yield server


@pytest.fixture(scope="session")
def one_seat_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """One seat that a request of higher priority may take; fails on `POISON`."""
    arguments = ("--max-num-seqs", "1", "--enable-priority-preemption")
    directory = tmp_path_factory.mktemp("one_seat")
    with running(directory, str(tiny_model), *arguments, env=faults(poison=POISON)) as server:
        yield server


@pytest.fixture(scope="session")
def static_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Static batches of up to 4."""
    arguments = ("--scheduler", "static", "--max-num-seqs", "4")
    with running(tmp_path_factory.mktemp("static"), str(tiny_model), *arguments) as server:
        yield server


@pytest.fixture(scope="session")
def dynamic_server(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Dynamic batches of up to 4; a request waits for a second at most."""
    arguments = ("--scheduler", "dynamic", "--max-num-seqs", "4", "--max-queue-time", "1")
    with running(tmp_path_factory.mktemp("dynamic"), str(tiny_model), *arguments) as server:
        yield server
