"""The prefix cache over HTTP: what it finds, what it saves, and that no answer changes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, until
from small_pool import NUM_POOL_TOKENS
from streams import COMPLETIONS, at_once

pytestmark = pytest.mark.e2e

BLOCK = 16
NUM_REQUESTS = 64
NUM_COMMON = 1500
# The blocks that all prompts have in common, as far as they are full.
NUM_CACHED = NUM_COMMON // BLOCK * BLOCK


@pytest.fixture
def tiny(tiny_server: ServerProcess) -> Iterator[httpx.Client]:
    with tiny_server.client() as client:
        client.post("/reset_prefix_cache")
        yield client
    until(tiny_server.is_idle)


def complete(client: httpx.Client, prompt: object, **body: Any) -> dict[str, Any]:
    response = client.post(
        COMPLETIONS, json={"prompt": prompt, "temperature": 0, "ignore_eos": True, **body}
    )
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def cached_tokens(answer: dict[str, Any]) -> int:
    num_tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_tokens


def prompts(num_own: int) -> list[list[int]]:
    """Prompts that begin with the same tokens and end with some of their own."""
    common = [20 + position * 7 % 100 for position in range(NUM_COMMON)]
    return [common + [20 + index] * num_own for index in range(NUM_REQUESTS)]


def test_a_shared_prefix_is_computed_once(
    client: httpx.Client, server: ServerProcess, record_property: pytest.RecordProperty
) -> None:
    num_own, num_output = 4, 3
    client.post("/reset_prefix_cache")
    before = server.metrics()
    answers = [complete(client, prompt, max_tokens=num_output) for prompt in prompts(num_own)]
    after = server.metrics()

    assert [cached_tokens(answer) for answer in answers] == [0] + [NUM_CACHED] * 63
    grown = {name: after[name] - before[name] for name in after}
    num_prompt = NUM_COMMON + num_own
    assert grown["prompt_tokens_total"] == 64 * num_prompt
    assert grown["prefix_cache_queries_total"] == 64 * num_prompt
    assert grown["prefix_cache_hits_total"] == 63 * NUM_CACHED
    # The first computes its whole prompt, the others only what follows; then each decodes.
    num_computed = num_prompt + 63 * (num_prompt - NUM_CACHED) + 64 * (num_output - 1)
    assert grown["iteration_tokens_sum"] == num_computed

    first, *later = [answer["metrics"]["ttft"] for answer in answers]
    record_property("ttft_of_the_first_to_the_later", round(first / median(later), 1))
    for index in (1, 63):
        uncached = complete(
            client, prompts(num_own)[index], max_tokens=num_output, use_prefix_cache=False
        )
        assert cached_tokens(uncached) == 0
        assert uncached["choices"] == answers[index]["choices"]


def test_a_large_batch_with_a_shared_prefix_answers_as_without_the_cache(
    tiny: httpx.Client, tiny_server: ServerProcess
) -> None:
    def answers(**body: Any) -> list[dict[str, Any]]:
        calls = [
            partial(complete, tiny, prompt, max_tokens=16, logprobs=1, **body)
            for prompt in prompts(5)
        ]
        return at_once(calls)

    before = tiny_server.metrics()["prefix_cache_hits_total"]
    cached = answers()
    hits = tiny_server.metrics()["prefix_cache_hits_total"] - before
    uncached = answers(use_prefix_cache=False)
    # Sent at once, they too compute the prefix once: the others wait for it.
    assert sorted(map(cached_tokens, cached)) == [0] + [NUM_CACHED] * 63
    assert hits == 63 * NUM_CACHED
    assert [cached_tokens(answer) for answer in uncached] == [0] * 64
    assert [a["choices"] for a in cached] == [a["choices"] for a in uncached]


def test_only_the_same_salt_shares_and_a_reset_forgets(
    tiny: httpx.Client, tiny_server: ServerProcess
) -> None:
    ask = partial(complete, tiny, list(range(20, 120)), max_tokens=1)
    assert cached_tokens(ask()) == 0
    assert cached_tokens(ask()) == 96  # of 100 tokens the full blocks
    assert cached_tokens(ask(cache_salt="mine")) == 0
    assert cached_tokens(ask(cache_salt="mine")) == 96
    assert cached_tokens(ask(use_prefix_cache=False)) == 0

    num_cached = tiny_server.metric("num_blocks", state="cached")
    assert num_cached == 2 * 6
    assert tiny.post("/reset_prefix_cache").json() == {"num_blocks": num_cached}
    assert tiny_server.metric("num_blocks", state="cached") == 0
    assert cached_tokens(ask()) == 0


@pytest.mark.parametrize("wanted", [{"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}])
def test_logprobs_of_a_cached_prompt_are_all_there(
    tiny: httpx.Client, small_step_server: ServerProcess, wanted: dict[str, Any]
) -> None:
    prompt = list(range(20, 20 + 33))  # one more than two blocks
    ask = partial(complete, tiny, prompt, max_tokens=4, **wanted)
    complete(tiny, prompt, max_tokens=4)  # from now on the blocks are there
    (first,), (second,) = ask()["choices"], ask()["choices"]
    (uncached,) = ask(use_prefix_cache=False)["choices"]
    with small_step_server.client() as client:
        (chunked,) = complete(client, prompt, max_tokens=4, **wanted)["choices"]
    assert first == second == uncached == chunked
    if "echo" in wanted:
        entries = first["logprobs"]["token_logprobs"]
        assert len(entries) == 33 + 4
    else:
        entries = first["prompt_logprobs"]
        assert len(entries) == 33
    assert entries[0] is None
    assert None not in entries[1:]


def test_prompts_that_nearly_fill_the_pool_are_answered(small_pool_server: ServerProcess) -> None:
    one, other = ([token] * (NUM_POOL_TOKENS * 95 // 100) for token in (5, 6))
    with small_pool_server.client() as client:
        answers = [complete(client, prompt, max_tokens=100) for prompt in (one, one, other, one)]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [100] * 4
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["length"] * 4
    assert cached_tokens(answers[1]) > NUM_POOL_TOKENS * 0.9
    assert answers[0]["choices"] == answers[1]["choices"] == answers[3]["choices"]
    until(small_pool_server.is_idle)
