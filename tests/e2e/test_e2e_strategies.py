"""How static and dynamic batching show over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from server_process import ServerProcess, until
from streams import COMPLETIONS, Stream, at_once, post_and_leave_open

pytestmark = pytest.mark.e2e

STATIC_DELAY = 1.0  # seconds that a static batch waits to fill when it is served


@pytest.fixture(params=["static", "dynamic"])
def batching(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    server: ServerProcess = request.getfixturevalue(f"{request.param}_server")
    yield server
    until(server.is_idle)


@pytest.fixture
def static(static_server: ServerProcess) -> Iterator[ServerProcess]:
    yield static_server
    until(static_server.is_idle)


def complete(server: ServerProcess, **body: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(COMPLETIONS, json={"prompt": [5], "ignore_eos": True, **body})


def test_the_banner_tells_how_batches_form(
    static_server: ServerProcess, dynamic_server: ServerProcess, tiny_server: ServerProcess
) -> None:
    assert "static, at most 4 sequences a batch, which waits 1 s" in static_server.stdout
    assert "16384 prompt tokens a batch, which waits 0.05 s" in dynamic_server.stdout
    assert "continuous, at most 64 sequences and 512 tokens a step" in tiny_server.stdout


def test_the_openai_client_gets_its_answer_whole_and_streamed(batching: ServerProcess) -> None:
    with openai.OpenAI(base_url=f"{batching.url}/v1", api_key="none", max_retries=0) as api:
        asked: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "One two three"}],
            "temperature": 0,
            "max_tokens": 30,
        }

        def whole() -> str | None:
            return api.chat.completions.create(**asked).choices[0].message.content

        def streamed() -> str:
            chunks = list(api.chat.completions.create(**asked, stream=True))
            assert chunks[-1].choices[0].finish_reason in ("stop", "length")
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

        texts = at_once([whole, streamed, whole, streamed])
    assert texts[0]
    assert len(set(texts)) == 1


def test_all_strategies_give_the_same_answer(
    batching: ServerProcess, tiny_server: ServerProcess
) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 40, "seed": 3, "logprobs": 2}
    batched = at_once([lambda: complete(batching, **body).json()["choices"]] * 4)
    assert batched == [complete(tiny_server, **body).json()["choices"]] * 4


def test_a_static_batch_that_never_fills_starts_after_a_second(static: ServerProcess) -> None:
    alone = complete(static, max_tokens=3).json()
    assert alone["metrics"]["queue_time"] >= STATIC_DELAY
    full = at_once([lambda: complete(static, max_tokens=3).json()] * 4)
    # It need not wait, unless its requests arrive that far apart.
    assert min(answer["metrics"]["queue_time"] for answer in full) < STATIC_DELAY


def test_a_static_batch_is_released_together_and_pads_what_is_done(static: ServerProcess) -> None:
    before = static.metrics()
    lengths = (5, 50)
    streams = [
        Stream(static.url, {"prompt": [5], "max_tokens": n, "ignore_eos": True}, num_events=0)
        for n in lengths
    ]
    for stream in streams:
        stream.join()
    after = static.metrics()

    for stream, num_tokens in zip(streams, lengths, strict=True):
        assert sum(bool(choice["text"]) for choice in stream.choices) == 1  # all text at once
        assert stream.events[-1]["usage"]["completion_tokens"] == num_tokens
    # Both rows are computed in each of the 50 steps, whatever the shorter one needs.
    for name in ("batch_slots_total", "iteration_tokens_sum"):
        assert after[name] - before[name] == 2 * max(lengths)
    useful = after["batch_slots_useful_total"] - before["batch_slots_useful_total"]
    assert useful == sum(lengths)


def test_a_request_behind_a_batch_is_refused_at_its_queue_time_not_at_the_batchs_end(
    dynamic_server: ServerProcess,
) -> None:
    endless = {"prompt": [5], "max_tokens": 30_000, "ignore_eos": True}
    refused_before = dynamic_server.metric("requests_refused_total", reason="time_limit")
    with post_and_leave_open(dynamic_server, endless):
        until(lambda: dynamic_server.metrics()["num_requests_running"] == 1)
        start = time.monotonic()
        late = complete(dynamic_server)
        waited = time.monotonic() - start
        assert dynamic_server.metrics()["num_requests_running"] == 1  # the batch goes on
    assert late.status_code == 429
    assert late.json()["error"]["code"] == "time_limit"
    assert "max_queue_time of 1 s" in late.json()["error"]["message"]
    assert int(late.headers["retry-after"]) >= 1
    assert waited >= 1.0
    refused = dynamic_server.metric("requests_refused_total", reason="time_limit")
    assert refused == refused_before + 1
    until(dynamic_server.is_idle)
