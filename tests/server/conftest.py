from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, Served, answer, serving
from gguf_files import write_tiny_model
from prometheus_client import disable_created_metrics, enable_created_metrics

from shoal.model.chat import ChatTemplate
from shoal.model.loader import open_model
from shoal.model.tokenizer import Tokenizer

ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="session", autouse=True)
def _metrics_as_the_command_shows_them() -> Iterator[None]:
    disable_created_metrics()
    yield
    enable_created_metrics()


@pytest.fixture(scope="session")
def tokenizer_and_template(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Tokenizer, ChatTemplate | None]:
    path: Path = write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")
    metadata = open_model(path).metadata
    tokenizer = Tokenizer.from_gguf(metadata)
    return tokenizer, ChatTemplate.from_gguf(metadata, tokenizer)


@pytest.fixture
def tokenizer(tokenizer_and_template: tuple[Tokenizer, ChatTemplate | None]) -> Tokenizer:
    return tokenizer_and_template[0]


@pytest.fixture
def engine(tokenizer_and_template: tuple[Tokenizer, ChatTemplate | None]) -> FakeEngine:
    tokenizer, template = tokenizer_and_template
    return FakeEngine(tokenizer, template, answer(ANSWER, tokenizer))


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as served:
        yield served


@pytest.fixture
def fuzzed(engine: FakeEngine) -> Iterator[tuple[asyncio.Runner, Served]]:
    """A server for tests that aren't coroutines themselves, with the runner of its loop."""
    with asyncio.Runner() as runner:
        context = serving(engine)
        served = runner.run(context.__aenter__())
        yield runner, served
        runner.run(context.__aexit__(None, None, None))
