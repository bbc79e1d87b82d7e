"""The engine in its own process, with a tiny real model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shoal.config import EngineConfig
from shoal.engine.client import AsyncEngine
from shoal.engine.errors import EngineDeadError, EngineStartError
from shoal.engine.outputs import CompletionDelta
from shoal.request import FinishReason, InvalidParameterError, SamplingParams
from shoal.scheduler.interface import QueueFullError, RequestRejectedError

PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=250, ignore_eos=True, n=100)
"""Thousands of steps where four sequences run at once."""


def config(path: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(path), kv_cache_memory_mib=16, **settings)


@pytest_asyncio.fixture
async def engine(tiny_path: Path) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config(tiny_path, max_num_seqs=4))
    await engine.start()
    yield engine
    await engine.close()


async def collect(
    engine: AsyncEngine, request_id: str, prompt: list[int], **params: Any
) -> list[CompletionDelta]:
    sampling_params = SamplingParams(**params)
    return [delta async for delta in engine.generate(request_id, prompt, sampling_params)]


def token_ids(deltas: list[CompletionDelta], index: int = 0) -> list[int]:
    return [token_id for delta in deltas if delta.index == index for token_id in delta.token_ids]


async def becomes(condition: Callable[[], bool], timeout: float = 10.0) -> bool:
    end = time.monotonic() + timeout
    while not condition() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return condition()


def engine_pid(engine: AsyncEngine) -> int:
    assert engine._loaded is not None
    return engine._loaded.connection._process.pid


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_answers_do_not_depend_on_what_else_runs(engine: AsyncEngine) -> None:
    params = {"max_tokens": 12, "ignore_eos": True, "seed": 3, "logprobs": 2}
    alone = await collect(engine, "alone", PROMPT, **params)
    crowd = await asyncio.gather(
        *(collect(engine, f"{i}", PROMPT + [i] * i, **params) for i in range(12))
    )
    assert token_ids(crowd[0]) == token_ids(alone)
    assert len(token_ids(alone)) == 12
    assert [d.logprobs for d in crowd[0]] == [d.logprobs for d in alone]
    assert await becomes(lambda: engine.stats is not None and engine.stats.num_blocks_used == 0)


async def test_observers_see_every_step_once(engine: AsyncEngine) -> None:
    num_steps: list[int] = []
    engine.watch_stats(lambda stats: num_steps.append(stats.num_steps))
    before = num_steps[-1]
    await collect(engine, "r", PROMPT, max_tokens=20, ignore_eos=True)
    assert await becomes(lambda: num_steps[-1] == before + 20)
    assert all(after - earlier in (0, 1) for earlier, after in pairwise(num_steps))


async def test_every_sample_finishes_once(engine: AsyncEngine) -> None:
    deltas = await collect(engine, "r", PROMPT, n=3, max_tokens=8, ignore_eos=True, seed=1)
    finished = sorted(delta.index for delta in deltas if delta.finish_reason is not None)
    assert finished == [0, 1, 2]
    assert len({tuple(token_ids(deltas, index)) for index in range(3)}) == 3


async def test_closing_a_stream_ends_the_request_in_the_engine(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=250, ignore_eos=True)
    async with aclosing(engine.generate("r", PROMPT, params)) as stream:
        await anext(stream)
    assert await becomes(
        lambda: (
            (stats := engine.stats) is not None
            and stats.num_requests_running == stats.num_blocks_used == 0
        )
    )


async def test_cancelling_a_waiting_request_takes_it_out_of_the_queue(engine: AsyncEngine) -> None:
    tasks = [
        asyncio.create_task(
            collect(engine, f"{i}", PROMPT, max_tokens=200, ignore_eos=True, seed=i)
        )
        for i in range(8)
    ]
    await asyncio.sleep(0)
    tasks[-1].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[-1], asyncio.CancelledError)
    assert all(isinstance(result, list) for result in results[:-1])


async def test_a_stop_string_ends_the_request_in_the_engine(engine: AsyncEngine) -> None:
    params = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.0}
    text = "".join(delta.text for delta in await collect(engine, "free", PROMPT, **params))
    stop = text[10:14]
    deltas = await collect(engine, "stopped", PROMPT, stop=(stop,), **params)
    assert "".join(delta.text for delta in deltas) == text[: text.index(stop)]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert await becomes(lambda: engine.stats is not None and engine.stats.num_blocks_used == 0)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ([], InvalidParameterError),
        ([10**9], InvalidParameterError),
        ([1] * 256, RequestRejectedError),
    ],
)
async def test_what_cannot_be_served_is_refused_before_the_first_delta(
    engine: AsyncEngine, prompt: list[int], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await collect(engine, "bad", prompt)
    assert len(token_ids(await collect(engine, "good", PROMPT, max_tokens=2, ignore_eos=True))) == 2


async def test_a_request_id_in_use_is_refused(engine: AsyncEngine) -> None:
    async with aclosing(engine.generate("r", PROMPT, SamplingParams())) as stream:
        await anext(stream)
        with pytest.raises(InvalidParameterError, match="'r' is in use"):
            await collect(engine, "r", PROMPT)


async def test_a_full_queue_refuses_at_once_and_serves_those_in_it(tiny_path: Path) -> None:
    engine = AsyncEngine(config(tiny_path, max_num_seqs=1, max_waiting_requests=2))
    await engine.start()
    try:
        results = await asyncio.gather(
            *(collect(engine, f"{i}", PROMPT, max_tokens=20, ignore_eos=True) for i in range(20)),
            return_exceptions=True,
        )
    finally:
        await engine.close()
    refused = [result for result in results if isinstance(result, BaseException)]
    assert refused
    assert all(isinstance(error, QueueFullError) and error.retry_after > 0 for error in refused)
    assert all(len(token_ids(r)) == 20 for r in results if not isinstance(r, BaseException))


async def test_when_the_process_dies_every_stream_is_told(engine: AsyncEngine) -> None:
    begun = engine.generate("begun", PROMPT, LONG)
    await anext(begun)
    os.kill(engine_pid(engine), signal.SIGSTOP)
    unread = [asyncio.create_task(collect(engine, f"{i}", PROMPT)) for i in range(10)]
    await asyncio.sleep(0)
    os.kill(engine_pid(engine), signal.SIGKILL)
    async with asyncio.timeout(5):
        with pytest.raises(EngineDeadError):
            async for _ in begun:
                pass
        results = await asyncio.gather(*unread, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDeadError] * 10
    assert not engine.is_alive
    assert not engine.is_ready
    with pytest.raises(EngineDeadError, match="exit code -9"):
        await collect(engine, "late", PROMPT)


async def test_closing_tells_streams_and_ends_the_process(tiny_path: Path) -> None:
    engine = AsyncEngine(config(tiny_path, max_num_seqs=4))
    await engine.start()
    pid = engine_pid(engine)
    begun = engine.generate("begun", PROMPT, LONG)
    await anext(begun)
    await engine.close()
    with pytest.raises(EngineDeadError, match="closed"):
        async for _ in begun:
            pass
    assert not is_running(pid)
    await engine.close()  # once more does nothing


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
async def test_the_process_leaves_signals_to_its_parent(
    engine: AsyncEngine, signal_number: signal.Signals
) -> None:
    os.kill(engine_pid(engine), signal_number)
    assert len(token_ids(await collect(engine, "r", PROMPT, max_tokens=5, ignore_eos=True))) == 5


async def test_an_idle_engine_uses_no_processor_time(engine: AsyncEngine) -> None:
    def processor_ticks() -> int:
        fields = Path(f"/proc/{engine_pid(engine)}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    await collect(engine, "r", PROMPT, max_tokens=5)
    await asyncio.sleep(0.2)
    before = processor_ticks()
    await asyncio.sleep(0.5)
    assert processor_ticks() - before <= 5  # of 50, at 100 ticks a second


def test_the_process_ends_with_its_parent(tiny_path: Path) -> None:
    script = f"""
import asyncio, os, signal
from shoal.config import EngineConfig
from shoal.engine.client import AsyncEngine

async def main():
    engine = AsyncEngine(EngineConfig(model={str(tiny_path)!r}, kv_cache_memory_mib=16))
    await engine.start()
    print(engine._loaded.connection._process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    parent = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    engine_process_id = int(parent.stdout)
    end = time.monotonic() + 10
    while is_running(engine_process_id) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(engine_process_id)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("nowhere.gguf", {}, "nowhere.gguf"),
        (None, {"max_model_len": 100_000}, "max_model_len is 100000"),
    ],
)
async def test_what_cannot_start_says_so_in_one_line(
    tiny_path: Path, model: str | None, settings: dict[str, Any], message: str
) -> None:
    engine = AsyncEngine(EngineConfig(model=model or str(tiny_path), **settings))
    with pytest.raises(EngineStartError, match=message) as failure:
        await engine.start()
    assert "\n" not in str(failure.value)
    assert not engine.is_alive
    await engine.close()
