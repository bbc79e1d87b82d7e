"""Bad requests and faults: every failure is an OpenAI error object, and the server goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_engine import FakeEngine, Script, Served, answer, stream
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.engine.errors import EngineDeadError, RequestFailedError
from shoal.engine.outputs import CompletionDelta
from shoal.model.tokenizer import Tokenizer
from shoal.request import InvalidParameterError, SamplingParams
from shoal.scheduler.interface import QueueFullError, RequestRejectedError, TimeLimitError
from shoal.server.connection import MAX_BODY_BYTES
from shoal.server.protocol import OPTION_FIELDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ERROR_BYTES = 2048


def failing(error: Exception, after: int = 0) -> Script:
    """Raises `error` when `after` tokens have come."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
        for _ in range(after):
            yield CompletionDelta(text="x", token_ids=[1])
        raise error

    return script


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * 600}, "prompt"),
        ({"prompt": "a", "stream": "true"}, "stream"),
        ({"prompt": "a", "n": 0, "stream": True}, "n"),
        ({"prompt": "a", "n": 100_000}, "n"),
        ({"prompt": ["a"] * 20, "n": 100}, "n"),
        ({"prompt": "a", "n": 10**400}, "n"),
        ({"prompt": "a", "n": 2, "best_of": 4}, "best_of"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": 2**70}, "seed"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt": "a", "logit_bias": {"abc": 0}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"-1": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": 1e9}}, "logit_bias"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": "x" * 1025}, "stop"),
        ({"prompt": "a", "temperature": 1e-30}, "temperature"),
        ({"prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": "a", "frobnicate": 1}, "frobnicate"),
        ({"prompt": "a", "guided_json": {}}, "guided_json"),
        ({"prompt": "a", "priority": "high"}, "priority"),
        ({"prompt": "a", "priority": 1.5}, "priority"),
        ({"prompt": "a", "priority": True}, "priority"),
        ({"prompt": "a", "priority": 1001}, "priority"),
        ({"prompt": "a", "priority": -1001}, "priority"),
        ({"prompt": "a", "cache_salt": 1}, "cache_salt"),
        ({"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
        ({"prompt": "a", "use_prefix_cache": "no"}, "use_prefix_cache"),
        ({"prompt": "a", "max_queue_time": "1"}, "max_queue_time"),
        ({"prompt": "a", "max_queue_time": -0.1}, "max_queue_time"),
        ({"prompt": "a", "max_queue_time": 1e7}, "max_queue_time"),
        ({"prompt": "a", "max_total_time": [1]}, "max_total_time"),
        ({"prompt": "a", "max_total_time": -1}, "max_total_time"),
        ({"prompt": "a", "max_total_time": 1e7}, "max_total_time"),
    ],
)
async def test_a_bad_parameter_is_named(
    served: Served, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    response = await served.client.post(COMPLETIONS, json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.partition(".")[0] in error["message"]
    assert engine.requests == []


@pytest.mark.parametrize(
    "body",
    [b"{:", b"", b"[]", b"null", b'"x"', b"{" * 100_000, b"[" * 100_000, b"\xff\xfe", b'{"a":NaN}'],
)
async def test_a_body_that_is_no_json_object_is_refused(served: Served, body: bytes) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize"):
        response = await served.client.post(path, content=body)
        assert response.status_code == 400
        assert response.json()["error"]["message"]


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
    st.lists(st.one_of(st.none(), st.integers(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
FIELDS = (
    *("model", "prompt", "n", "best_of", "echo", "logprobs", "stop", "stream", "stream_options"),
    *("seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "user"),
    *("logit_bias", "stop_token_ids", "presence_penalty", "repetition_penalty", "suffix", "tools"),
    *("messages", "top_logprobs", "response_format", "metadata", "priority", "ignore_eos"),
    *("cache_salt", "use_prefix_cache", "max_queue_time", "max_total_time"),
)


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    path=st.sampled_from((COMPLETIONS, CHAT)),
    fields=st.dictionaries(st.sampled_from(FIELDS), values, max_size=3),
)
def test_no_field_of_any_type_is_a_servers_fault(
    fuzzed: tuple[asyncio.Runner, Served], path: str, fields: dict[str, Any]
) -> None:
    runner, served = fuzzed
    valid = (
        {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    )
    response = runner.run(served.client.post(path, json=valid | fields))
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert len(response.content) < MAX_ERROR_BYTES


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [{"bad": "x" * 100}] * 10_000},
        {"prompt": "a", "x" * 100_000: 1},
        {"prompt": "a", "model": "m" * 100_000},
        {"prompt": "a", "service_tier": "t" * 100_000},
        {"prompt": "a", "stop": [1] * 10_000},
    ],
)
async def test_an_error_is_small_whatever_was_sent(served: Served, body: dict[str, Any]) -> None:
    response = await served.client.post(COMPLETIONS, json=body)
    assert response.status_code in (400, 404)
    assert len(response.content) < MAX_ERROR_BYTES


async def test_a_body_over_the_limit_is_refused_declared_or_not(served: Served) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(9):
            yield b" " * (MAX_BODY_BYTES // 8)

    for content in (b" " * (MAX_BODY_BYTES + 1), chunks()):
        response = await served.client.post(COMPLETIONS, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("POST", "/health", 405)],
)
async def test_routing_errors_are_error_objects(
    served: Served, method: str, path: str, status: int
) -> None:
    response = await served.client.request(method, path)
    assert response.status_code == status
    assert response.json()["error"]["message"]


@pytest.mark.parametrize("model", ["nope", ""])
async def test_an_unknown_model_is_404_and_names_the_served_ones(
    served: Served, model: str
) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
        ("/tokenize", {"prompt": "a"}),
    ):
        response = await served.client.post(path, json={"model": model, **body})
        error = response.json()["error"]
        assert response.status_code == 404
        assert error["code"] == "model_not_found"
        assert error["param"] == "model"
        assert "'fake', 'alias'" in error["message"]


@pytest.mark.parametrize("body", [{}, {"model": None}, {"model": "alias"}])
async def test_every_served_name_and_no_name_answer(served: Served, body: dict[str, Any]) -> None:
    response = await served.client.post(COMPLETIONS, json={"prompt": "a", **body})
    assert response.json()["model"] == (body.get("model") or "fake")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidParameterError("logit_bias", "token id 999999"), (400, "logit_bias")),
        (RequestRejectedError("300 tokens, the pool holds 128"), (400, "prompt")),
        (QueueFullError("the queue is full", 2.5), (429, None)),
        (TimeLimitError("no token came", 2.5), (429, None)),
        (RequestFailedError("step failed"), (500, None)),
        (EngineDeadError("gone"), (503, None)),
        (ZeroDivisionError("secret"), (500, None)),
    ],
)
async def test_an_error_before_the_first_token_has_its_status(
    served: Served,
    engine: FakeEngine,
    error: Exception,
    expected: tuple[int, str | None],
    streamed: bool,
) -> None:
    status, param = expected
    engine.script = failing(error)
    for prompt in ("a", ["a", "b"]):
        response = await served.client.post(
            COMPLETIONS, json={"prompt": prompt, "stream": streamed}
        )
        assert response.status_code == status
        assert response.json()["error"]["param"] == param
        assert "secret" not in response.text
        assert engine.num_running == 0


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (QueueFullError("12 requests wait already", 2.4), ("queue_full", "3")),
        (QueueFullError("12 requests wait already", 0.01), ("queue_full", "1")),
        (TimeLimitError("no token came within its max_queue_time", 7.0), ("time_limit", "7")),
    ],
)
async def test_too_much_to_do_says_when_to_come_again(
    served: Served,
    engine: FakeEngine,
    error: QueueFullError,
    expected: tuple[str, str],
    streamed: bool,
) -> None:
    code, retry_after = expected
    engine.script = failing(error)
    response = await served.client.post(COMPLETIONS, json={"prompt": "a", "stream": streamed})
    assert response.status_code == 429
    assert response.headers["retry-after"] == retry_after
    assert response.json()["error"] == {
        "message": str(error),
        "type": "rate_limit_error",
        "param": None,
        "code": code,
    }


@pytest.mark.parametrize("error", [RequestFailedError("step failed"), ZeroDivisionError()])
async def test_an_error_in_mid_stream_is_the_last_event(
    served: Served, engine: FakeEngine, error: Exception
) -> None:
    engine.script = failing(error, after=3)
    for path, body in (
        (COMPLETIONS, {"prompt": "a"}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    ):
        *chunks, last = await stream(served, path, **body)
        assert last["error"]["type"] == "server_error"
        assert all(c["finish_reason"] is None for chunk in chunks for c in chunk["choices"])


async def test_an_error_of_one_prompt_aborts_the_others(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    bad = tokenizer.encode("bad")

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
        if prompt == bad:
            raise RequestRejectedError("too long")
        while True:
            yield CompletionDelta(text="x", token_ids=[1])
            await asyncio.sleep(0.01)

    engine.script = script
    response = await served.client.post(COMPLETIONS, json={"prompt": ["a", "bad", "c"]})
    assert response.status_code == 400
    assert engine.num_running == 0
    assert engine.num_aborted == 3

    engine.script = answer("fine", tokenizer)
    assert (await served.client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 200


async def test_the_description_of_the_api_names_every_parameter(served: Served) -> None:
    description = json.loads((await served.client.get("/openapi.json")).content)
    schemas = description["components"]["schemas"]
    assert "include_stop_str_in_output" in schemas["CompletionBody"]["properties"]
    assert "top_logprobs" in schemas["ChatBody"]["properties"]
    for name in OPTION_FIELDS:
        assert name in schemas["CompletionBody"]["properties"]
        assert name in schemas["ChatBody"]["properties"]
    assert set(description["paths"]["/reset_prefix_cache"]) == {"post"}
