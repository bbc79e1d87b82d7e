"""What a request's parameters do to its answer, over HTTP with the real model."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import httpx
import pytest
from streams import at_once

pytestmark = pytest.mark.e2e

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SUM = [{"role": "user", "content": "What is 2 + 2?"}]  # the answer is one short sentence
FOX = {"prompt": "The quick brown fox", "temperature": 0, "max_tokens": 40, "ignore_eos": True}


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    """The first choice of a completion."""
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def pieces(client: httpx.Client, path: str = COMPLETIONS, **body: Any) -> list[str]:
    """The texts of a stream's chunks."""
    with client.stream("POST", path, json={"stream": True, **body}) as response:
        assert response.status_code == 200, response.read()
        lines = response.read().decode().split("\n")  # answers may hold other ends of lines
        data = [line.removeprefix("data: ") for line in lines if line]
    choices = [choice for event in data[:-1] for choice in json.loads(event)["choices"]]
    return [
        choice["text"] if path == COMPLETIONS else choice["delta"].get("content", "")
        for choice in choices
    ]


@pytest.mark.parametrize(("start", "length"), [(12, 7), (30, 12), (41, 3), (20, 25)])
def test_a_stop_string_across_tokens_never_leaks(
    client: httpx.Client, start: int, length: int
) -> None:
    text = complete(client, **FOX)["text"]
    stop = text[start : start + length]
    expected = text[: text.index(stop)]

    whole = complete(client, stop=["never said", stop], **FOX)
    streamed = pieces(client, stop=["never said", stop], **FOX)
    included = complete(client, stop=stop, include_stop_str_in_output=True, **FOX)

    assert whole["text"] == expected
    assert whole["finish_reason"] == "stop"
    assert whole["stop_reason"] == stop
    assert "".join(streamed) == expected
    assert included["text"] == expected + stop


def test_a_special_token_as_stop_string_stops(client: httpx.Client) -> None:
    body = {"messages": SUM, "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    response = client.post(CHAT, json={**body, "stop": ["<|im_end|>"]}).json()
    assert response["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in response["choices"][0]["message"]["content"]
    assert response["usage"]["completion_tokens"] < 200


def test_characters_of_several_tokens_arrive_whole(client: httpx.Client) -> None:
    body: dict[str, Any] = {
        "prompt": "안녕 😀 안녕 😀 안녕 😀 안녕 😀 안녕 😀 안녕 😀 안녕",
        "temperature": 0,
        "max_tokens": 30,
        "ignore_eos": True,
    }
    text = complete(client, **body)["text"]
    streamed = pieces(client, **body)
    assert "".join(streamed) == text
    assert "😀" in text
    assert "안녕" in text
    # The last character may be cut by max_tokens; it is shown as such at the very end only.
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(streamed).rstrip("\N{REPLACEMENT CHARACTER}")


def test_ignore_eos_gives_exactly_max_tokens(client: httpx.Client) -> None:
    body = {"messages": SUM, "temperature": 0, "max_tokens": 50}
    ends = client.post(CHAT, json=body).json()
    goes_on = client.post(CHAT, json={**body, "ignore_eos": True}).json()
    assert ends["choices"][0]["finish_reason"] == "stop"
    assert goes_on["usage"]["completion_tokens"] == 50
    assert goes_on["choices"][0]["finish_reason"] == "length"


def test_several_samples_of_several_prompts_come_in_order(client: httpx.Client) -> None:
    prompts = ["One, two, three,", "The capital of France is"]
    body = {"prompt": prompts, "n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 8, "echo": True}
    choices = client.post(COMPLETIONS, json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice in choices:
        assert choice["text"].startswith(prompts[choice["index"] // 2])
    assert choices[0]["text"] != choices[1]["text"]


def test_three_samples_are_distinct_and_best_of_must_be_n(client: httpx.Client) -> None:
    body = {"prompt": "Once upon a time", "n": 3, "max_tokens": 20, "seed": 1}
    choices = client.post(COMPLETIONS, json={**body, "best_of": 3}).json()["choices"]
    assert len({choice["text"] for choice in choices}) == 3
    assert client.post(COMPLETIONS, json={**body, "best_of": 4}).status_code == 400


def test_the_seed_decides_the_answer(client: httpx.Client) -> None:
    def text(seed: int) -> str:
        answer: str = complete(
            client, prompt="Once upon a time", temperature=0.8, seed=seed, max_tokens=30
        )["text"]
        return answer

    first, again, other = text(1), text(1), text(2)
    assert first == again
    assert first != other


def test_an_answer_does_not_depend_on_its_batch(client: httpx.Client) -> None:
    asked = {**FOX, "logprobs": 2, "max_tokens": 24}
    alone = complete(client, **asked)
    for num_others in (1, 3, 7, 31):  # more than there are seats, too
        others = [
            partial(
                complete, client, prompt=f"{number} is", seed=number, max_tokens=number % 20 + 5
            )
            for number in range(num_others)
        ]
        assert at_once([partial(complete, client, **asked), *others])[0] == alone


BAD_TOKENS = [
    ({"logit_bias": {"999999": 5}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"abc": 0}}, "logit_bias"),
    ({"logit_bias": {"5": 1e9}}, "logit_bias"),
    ({"stop_token_ids": [999999], "min_tokens": 1}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"n": 100_000}, "n"),
]


def test_bad_requests_are_refused_and_their_batch_mates_unharmed(client: httpx.Client) -> None:
    alone = complete(client, **FOX)["text"]
    mates: list[str] = []
    threads = [
        threading.Thread(target=lambda: mates.append(complete(client, **FOX)["text"]))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for body, param in BAD_TOKENS:
        for streamed in (False, True):
            response = client.post(COMPLETIONS, json={**FOX, **body, "stream": streamed})
            assert response.status_code == 400, body
            assert response.json()["error"]["param"] == param
    for thread in threads:
        thread.join()
    assert mates == [alone] * 3
    assert complete(client, **FOX)["text"] == alone


def test_a_biased_token_is_always_or_never_taken(client: httpx.Client) -> None:
    usual = complete(client, logprobs=0, **FOX)
    first = usual["logprobs"]["tokens"][0]
    token_ids: Sequence[int] = client.post("/tokenize", json={"prompt": first}).json()["tokens"]
    assert len(token_ids) == 1
    banned = complete(client, logprobs=0, logit_bias={str(token_ids[0]): -100}, **FOX)
    forced = complete(client, logprobs=0, logit_bias={str(token_ids[0]): 100}, **FOX)
    assert first not in banned["logprobs"]["tokens"]
    assert set(forced["logprobs"]["tokens"]) == {first}


def test_logprobs_of_echo_continue_those_of_the_prompt(client: httpx.Client) -> None:
    choice = complete(client, echo=True, logprobs=1, **FOX)
    fields = choice["logprobs"]
    assert fields["token_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in fields["token_logprobs"][1:])
    assert "".join(fields["tokens"]) == choice["text"]
    asked = complete(client, prompt_logprobs=1, **FOX)["prompt_logprobs"]
    echoed = fields["token_logprobs"][: len(asked)]
    assert asked[0] is None
    assert [next(iter(entry.values()))["logprob"] for entry in asked[1:]] == echoed[1:]
