"""Asking the engine's process who runs and who waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio
from gguf_files import TinyModel, write_tiny_model

from shoal.config import EngineConfig
from shoal.engine.client import MAX_WAITING_VIEWED, AsyncEngine
from shoal.engine.errors import EngineDeadError
from shoal.engine.messages import Advanced, ViewBatch
from shoal.request import SamplingParams

PROMPT = [5, 6, 7]
SHORT = SamplingParams(max_tokens=100, ignore_eos=True)
LONG = SamplingParams(max_tokens=30_000, ignore_eos=True)  # seconds


@pytest.fixture(scope="module")
def long_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context that takes seconds to fill."""
    path = tmp_path_factory.mktemp("long") / "tiny.gguf"
    return write_tiny_model(path, TinyModel(context_length=32768))


@pytest_asyncio.fixture
async def engine(long_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(EngineConfig(model=str(long_path), max_num_seqs=1))
    await engine.start()
    yield engine
    await engine.close()


async def test_an_idle_engine_answers_at_once(engine: AsyncEngine) -> None:
    async with asyncio.timeout(10):
        view = await engine.view_batch()
    assert (view.running, view.waiting) == ([], [])


async def test_who_runs_and_who_waits_is_told(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate("first", PROMPT, LONG)) as first:
        await anext(first)
        rest = [
            asyncio.create_task(anext(engine.generate(f"{index}", PROMPT, LONG)))
            for index in range(MAX_WAITING_VIEWED + 5)
        ]
        await asyncio.sleep(0)
        view = await engine.view_batch()
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
    (running,) = view.running
    assert running.request_id == "first/0"
    assert running.num_prompt_tokens == len(PROMPT)
    assert running.num_output_tokens >= 1
    assert [request.request_id for request in view.waiting] == [
        f"{index}/0" for index in range(MAX_WAITING_VIEWED)
    ]


async def test_those_who_ask_at_once_share_a_question(engine: AsyncEngine) -> None:
    assert engine._loaded is not None
    sent = []
    send = engine._loaded.connection.send
    engine._loaded.connection.send = lambda command: (sent.append(command), send(command))
    hung_up = asyncio.create_task(engine.view_batch())
    await asyncio.sleep(0)
    hung_up.cancel()
    views = await asyncio.gather(*(engine.view_batch() for _ in range(5)))
    assert views == [views[0]] * 5
    assert [type(command) for command in sent] == [ViewBatch]


async def test_nothing_is_told_unasked(engine: AsyncEngine) -> None:
    events = []
    handle = engine._handle
    engine._handle = lambda loaded, event: (events.append(event), handle(loaded, event))
    async with aclosing(engine.generate("r", PROMPT, SHORT)) as deltas:
        async for _ in deltas:
            pass
    assert len(events) > 50
    assert all(isinstance(event, Advanced) and event.batch is None for event in events)


async def test_a_dead_engine_says_so(engine: AsyncEngine) -> None:
    asked = asyncio.create_task(engine.view_batch())
    await asyncio.sleep(0)
    await engine.close()
    for question in (asked, engine.view_batch()):
        with pytest.raises(EngineDeadError):
            await question
