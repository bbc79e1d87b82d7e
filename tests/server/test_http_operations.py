"""Hang-ups, shutdown, probes, keys, request ids, the access log, tokenising, the prefix cache."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import exposition
import pytest
from fake_engine import FakeEngine, Served, endless, eventually, queued, send_raw, serving

from shoal.model.tokenizer import Tokenizer

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize("script", [endless, queued])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_hang_up_aborts_running_and_queued_requests(
    served: Served, engine: FakeEngine, script: Any, streamed: bool, prompt: Any
) -> None:
    engine.script = script
    num_prompts = len(prompt)
    writer = await send_raw(served, {"prompt": prompt, "stream": streamed})
    await eventually(lambda: engine.num_running == num_prompts)

    writer.transport.abort()

    await eventually(lambda: engine.num_running == 0)
    assert engine.num_aborted == num_prompts
    await eventually(served.state._idle.is_set)
    text = (await served.client.get("/metrics")).text
    aborted = exposition.value(text, "shoal:request_success_total", finished_reason="abort")
    assert aborted == num_prompts


async def test_closing_a_stream_after_three_chunks_aborts_it(
    served: Served, engine: FakeEngine
) -> None:
    engine.script = endless
    body = {"prompt": "a", "stream": True}
    async with served.client.stream("POST", COMPLETIONS, json=body) as response:
        lines = response.aiter_lines()
        for _ in range(6):
            await anext(lines)
    await eventually(lambda: engine.num_aborted == 1)


async def test_the_probes_follow_the_engine(served: Served, engine: FakeEngine) -> None:
    async def statuses() -> tuple[int, int]:
        health, ready = [await served.client.get(path) for path in ("/health", "/ready")]
        return health.status_code, ready.status_code

    engine.is_ready = False
    assert await statuses() == (200, 503)
    loading = await served.client.post(COMPLETIONS, json={"prompt": "a"})
    assert loading.status_code == 503
    assert loading.json()["error"]["code"] == "model_loading"

    engine.is_ready = True
    assert await statuses() == (200, 200)

    served.state.draining = True
    assert await statuses() == (200, 503)
    draining = await served.client.post(COMPLETIONS, json={"prompt": "a"})
    assert draining.status_code == 503
    assert draining.json()["error"]["code"] == "shutting_down"

    served.state.draining = engine.is_alive = False
    assert await statuses() == (503, 503)


@pytest.mark.parametrize("streamed", [False, True])
async def test_stopping_now_tells_the_clients(
    served: Served, engine: FakeEngine, streamed: bool
) -> None:
    engine.script = endless
    body = {"prompt": "a", "stream": streamed}
    answer = asyncio.create_task(served.client.post(COMPLETIONS, json=body))
    await eventually(lambda: engine.num_running == 1)
    await asyncio.sleep(0.05)

    served.state.stop_now()

    response = await answer
    assert engine.num_aborted == 1
    assert '"code":"shutting_down"' in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if streamed else 503)


async def test_running_requests_count_as_in_flight(served: Served, engine: FakeEngine) -> None:
    engine.script = endless
    writer = await send_raw(served, {"prompt": "a", "stream": True})
    await eventually(lambda: engine.num_running == 1)
    idle = asyncio.create_task(served.state.wait_until_idle())
    await asyncio.sleep(0.05)
    assert not idle.done()
    writer.transport.abort()
    await asyncio.wait_for(idle, 2)


async def test_a_key_guards_all_but_the_probes(engine: FakeEngine) -> None:
    async with serving(engine, api_key="geheim") as served:

        async def status(path: str, authorization: str | None = None) -> int:
            headers = {} if authorization is None else {"authorization": authorization.encode()}
            return (await served.client.get(path, headers=headers)).status_code

        assert await status("/v1/models", "Bearer geheim") == 200
        for wrong in (None, "Bearer falsch", "Bearer", "geheim", "Basic geheim", "Bearer gehéim"):
            assert await status("/v1/models", wrong) == 401
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert await status(path) == 200
        for path in (COMPLETIONS, "/reset_prefix_cache"):
            refused = await served.client.post(path, json={"prompt": "a"})
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert engine.requests == []


@pytest.mark.parametrize(
    ("given", "kept"), [("my-id", True), ("x" * 129, False), ("a\tb", False), ("", False)]
)
async def test_a_request_id_is_kept_or_made(
    served: Served, caplog: pytest.LogCaptureFixture, given: str, kept: bool
) -> None:
    caplog.set_level(logging.INFO, "shoal.access")
    response = await served.client.post(
        COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": given}
    )
    request_id = response.headers["x-request-id"]
    assert (request_id == given) is kept
    assert request_id
    await eventually(lambda: bool(caplog.records))
    line = json.loads(caplog.records[-1].message)
    assert line["request_id"] == request_id
    assert line["status"] == 200
    assert line["prompt_tokens"] == response.json()["usage"]["prompt_tokens"]
    assert line["completion_tokens"] == response.json()["usage"]["completion_tokens"]
    assert line["finish_reasons"] == ["stop"]
    assert 0 <= line["time_to_first_token"] <= line["duration"]


async def test_the_models_are_listed_under_each_name(served: Served) -> None:
    models = (await served.client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["fake", "alias"]
    assert (await served.client.get("/v1/models/alias")).json()["max_model_len"] == 256
    assert (await served.client.get("/v1/models/nope")).status_code == 404


async def test_tokenize_and_detokenize_are_inverse(served: Served, tokenizer: Tokenizer) -> None:
    for text in ("What is the capital of France?", "x" * 10_000):
        answer = (await served.client.post("/tokenize", json={"prompt": text})).json()
        assert answer["tokens"] == tokenizer.encode(text)
        assert answer["count"] == len(answer["tokens"])
        back = await served.client.post("/detokenize", json={"tokens": answer["tokens"]})
        assert back.json() == {"prompt": text}


async def test_tokenize_puts_messages_through_the_template(
    served: Served, tokenizer: Tokenizer
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "add_generation_prompt": False}
    answer = (await served.client.post("/tokenize", json=body)).json()
    assert tokenizer.decode(answer["tokens"], False) == "<|im_start|>user\nhi<|im_end|>\n"


@pytest.mark.parametrize("tokens", [[-1], [10**9], [2**70], ["a"], None, "x"])
async def test_detokenize_refuses_what_is_no_token(served: Served, tokens: object) -> None:
    response = await served.client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": []}, {"prompt": 1}])
async def test_tokenize_wants_one_of_prompt_and_messages(
    served: Served, body: dict[str, Any]
) -> None:
    assert (await served.client.post("/tokenize", json=body)).status_code == 400


async def test_the_version_is_told(served: Served) -> None:
    assert (await served.client.get("/version")).json()["version"]


async def test_resetting_the_prefix_cache_says_how_many_blocks_were_forgotten(
    served: Served, engine: FakeEngine
) -> None:
    engine.num_cached_blocks = 12
    for num_blocks in (12, 0):
        response = await served.client.post("/reset_prefix_cache")
        assert response.status_code == 200
        assert response.json() == {"num_blocks": num_blocks}
    engine.is_ready = False
    assert (await served.client.post("/reset_prefix_cache")).status_code == 503
