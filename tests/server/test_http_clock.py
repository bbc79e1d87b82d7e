"""From when to when the server's latencies count: first byte in, first token out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import exposition
import pytest
from fake_engine import FakeEngine, Served

from shoal.engine.outputs import CompletionDelta
from shoal.request import FinishReason, RequestOptions, SamplingParams
from shoal.server.generation import Generation
from shoal.server.record import RequestRecord
from shoal.server.state import ServerState

PAUSE = 0.3  # seconds; nothing else here takes as long


def post(**body: object) -> bytes:
    content = json.dumps({"prompt": "a"} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def read_answer(reader: asyncio.StreamReader) -> str:
    """The body of a response that tells its length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    assert head.startswith("http/1.1 200")
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return (await reader.readexactly(length)).decode()


def metric(state: ServerState, name: str, **labels: str) -> float:
    return exposition.value(state.metrics.exposition().decode(), f"shoal:{name}", **labels)


async def slow(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
    await asyncio.sleep(PAUSE)
    yield CompletionDelta(text="x", token_ids=[1], finish_reason=FinishReason.LENGTH)


@pytest.mark.parametrize("cut", [1, 30, -1])
async def test_latencies_begin_with_the_first_byte(
    served: Served, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "shoal.access")
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    request = post()
    writer.write(request[:cut])
    await asyncio.sleep(PAUSE)
    writer.write(request[cut:])
    await read_answer(reader)
    writer.close()
    for name in ("time_to_first_token", "e2e_request_latency"):
        assert metric(served.state, f"{name}_seconds_sum") >= PAUSE
    (line,) = (json.loads(record.getMessage()) for record in caplog.records)
    assert line["duration"] >= line["time_to_first_token"] >= PAUSE


async def test_a_pause_between_requests_of_a_connection_counts_for_none(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    for _ in range(2):
        writer.write(post())
        await read_answer(reader)
        await asyncio.sleep(PAUSE)
    writer.close()
    assert metric(served.state, "e2e_request_latency_seconds_count") == 2
    assert metric(served.state, "e2e_request_latency_seconds_sum") < PAUSE


async def test_a_pipelined_request_counts_its_wait_for_the_one_before(
    served: Served, engine: FakeEngine
) -> None:
    engine.script = slow
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
    writer.write(post() + post(n=1, max_tokens=1))
    for _ in range(2):
        await read_answer(reader)
    writer.close()
    assert metric(served.state, "time_to_first_token_seconds_count") == 2
    assert metric(served.state, "time_to_first_token_seconds_sum") >= (1 + 2) * PAUSE


@pytest.fixture
def generation(engine: FakeEngine) -> Generation:
    state = ServerState(engine=engine, model_names=("fake",))
    record = RequestRecord("mine", "POST", "/v1/completions")
    return Generation(state, record, [[1]], SamplingParams(), RequestOptions())


async def test_a_token_counts_when_its_reader_has_sent_it(generation: Generation) -> None:
    deltas = generation.deltas()
    await anext(deltas)
    assert metric(generation.state, "time_to_first_token_seconds_count") == 0
    await asyncio.sleep(PAUSE)  # as long as the writing takes
    await anext(deltas)
    assert metric(generation.state, "time_to_first_token_seconds_sum") >= PAUSE
    assert metric(generation.state, "generation_tokens_total") == 1
    await deltas.aclose()


async def test_a_token_counts_even_if_its_reader_goes_away(generation: Generation) -> None:
    deltas = generation.deltas()
    await anext(deltas)
    await deltas.aclose()
    assert metric(generation.state, "generation_tokens_total") == 1
    assert metric(generation.state, "request_success_total", finished_reason="abort") == 1
    assert generation.usage().completion_tokens == 1
