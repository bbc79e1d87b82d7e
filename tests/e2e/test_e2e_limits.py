"""Context and pool: what doesn't fit is cut or refused, by one rule on both endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from server_process import ServerProcess
from small_pool import NUM_POOL_TOKENS

pytestmark = pytest.mark.e2e

CONTEXT = 64
CHAT = "/v1/chat/completions"


@pytest.fixture
def guarded(guarded_server: ServerProcess) -> Iterator[httpx.Client]:
    with guarded_server.client(headers={"authorization": "Bearer secret"}) as client:
        yield client


def complete(client: httpx.Client, prompt: object, **body: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True} | body)


@pytest.mark.parametrize("num_tokens", [1, 30, CONTEXT - 1])
def test_max_tokens_beyond_the_context_is_cut(guarded: httpx.Client, num_tokens: int) -> None:
    answer = complete(guarded, [5] * num_tokens, max_tokens=1000).json()
    assert answer["usage"]["completion_tokens"] == CONTEXT - num_tokens
    assert answer["choices"][0]["finish_reason"] == "length"


def test_the_chat_endpoint_cuts_by_the_same_rule(guarded: httpx.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for body in ({"max_tokens": 1000}, {}):
        answer = guarded.post(CHAT, json={"messages": messages, "ignore_eos": True, **body}).json()
        assert answer["usage"]["total_tokens"] == CONTEXT
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("num_tokens", [CONTEXT, CONTEXT + 1, 5000])
def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(
    guarded: httpx.Client, num_tokens: int
) -> None:
    for body in ({}, {"stream": True}):
        response = complete(guarded, [5] * num_tokens, **body)
        error = response.json()["error"]
        assert response.status_code == 400
        assert error["param"] == "prompt"
        assert str(num_tokens) in error["message"]
        assert str(CONTEXT) in error["message"]
    assert complete(guarded, [5]).status_code == 200


def test_a_long_chat_is_refused_with_both_numbers(guarded: httpx.Client) -> None:
    messages = [{"role": "user", "content": "long " * 100}]
    response = guarded.post(CHAT, json={"messages": messages})
    assert response.status_code == 400
    assert str(CONTEXT) in response.json()["error"]["message"]


def test_a_prompt_longer_than_the_pool_is_refused_and_the_next_is_answered(
    small_pool_server: ServerProcess,
) -> None:
    with small_pool_server.client() as client:
        response = complete(client, [5] * 20_000)
        message = response.json()["error"]["message"]
        assert response.status_code == 400
        assert "20000" in message
        assert f" {NUM_POOL_TOKENS} " in message
        assert complete(client, [5]).status_code == 200


def test_requests_that_fill_the_pool_together_all_finish(
    small_pool_server: ServerProcess,
) -> None:
    with small_pool_server.client() as client:
        answer = complete(client, [[5] * 900 for _ in range(8)], max_tokens=300).json()
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 8
    assert answer["usage"]["completion_tokens"] == 8 * 300


def test_a_key_is_asked_for(guarded_server: ServerProcess, guarded: httpx.Client) -> None:
    with guarded_server.client() as anonymous:
        refused = anonymous.get("/v1/models")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics", "/version"):
            assert anonymous.get(path).status_code == 200
    assert guarded.get("/v1/models").status_code == 200


def test_every_served_name_answers_and_others_do_not(guarded: httpx.Client) -> None:
    assert [m["id"] for m in guarded.get("/v1/models").json()["data"]] == ["first", "second"]
    assert complete(guarded, "a", model="second").json()["model"] == "second"
    unknown = complete(guarded, "a", model="tiny")
    assert unknown.status_code == 404
    assert "'first', 'second'" in unknown.json()["error"]["message"]
