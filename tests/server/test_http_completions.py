"""POST /v1/completions: prompts, choices, echo, logprobs, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Served, answer, stream

from shoal.model.tokenizer import Tokenizer

ANSWER = "The capital of France is Paris."


async def complete(served: Served, **body: Any) -> httpx.Response:
    return await served.client.post("/v1/completions", json={"prompt": "Hello"} | body)


async def test_the_answer_has_text_finish_reason_and_usage(
    served: Served, tokenizer: Tokenizer
) -> None:
    answer = (await complete(served)).json()

    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": ANSWER,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    prompt_tokens, completion_tokens = len(tokenizer.encode("Hello")), len(tokenizer.encode(ANSWER))
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["model"] == "fake"
    assert answer["object"] == "text_completion"


async def test_without_max_tokens_sixteen_are_generated(served: Served, engine: FakeEngine) -> None:
    await complete(served)
    assert engine.requests[0][1].max_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("a b", 1), (["a", "b"], 2), ([5, 6, 7], 1), ([[5, 6], [7]], 2)],
)
async def test_every_form_of_prompt_is_accepted(
    served: Served, engine: FakeEngine, prompt: object, num_prompts: int
) -> None:
    answer = (await complete(served, prompt=prompt, n=2)).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * num_prompts))
    assert len(engine.requests) == num_prompts


async def test_choices_of_several_prompts_are_in_prompt_order(
    served: Served, tokenizer: Tokenizer
) -> None:
    body: dict[str, Any] = {"prompt": ["first ", "second "], "n": 2, "echo": True}
    expected = ["first ", "first ", "second ", "second "]

    whole = (await complete(served, **body)).json()["choices"]
    texts = dict.fromkeys(range(4), "")
    for chunk in (await stream(served, "/v1/completions", **body))[:-1]:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]

    assert [choice["text"] for choice in whole] == [prompt + ANSWER for prompt in expected]
    assert list(texts.values()) == [prompt + ANSWER for prompt in expected]


async def test_a_stream_has_the_whole_text_and_one_finish(served: Served) -> None:
    *chunks, done = await stream(served, "/v1/completions", prompt="Hello")
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == ANSWER
    assert [choice["finish_reason"] for choice in choices][-1] == "stop"
    assert sum(choice["finish_reason"] is not None for choice in choices) == 1
    assert all("usage" not in chunk for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_chunk_unless_asked(served: Served, options: object) -> None:
    *chunks, _ = await stream(served, "/v1/completions", prompt="Hello", stream_options=options)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


async def test_the_usage_chunk_is_last_and_has_no_choices(served: Served) -> None:
    whole = (await complete(served)).json()
    *chunks, last, _ = await stream(
        served, "/v1/completions", prompt="Hello", stream_options={"include_usage": True}
    )
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_logprobs_align_with_tokens_and_text(served: Served, tokenizer: Tokenizer) -> None:
    (choice,) = (await complete(served, logprobs=1)).json()["choices"]
    fields = choice["logprobs"]
    token_ids = tokenizer.encode(ANSWER)
    assert "".join(fields["tokens"]) == ANSWER
    assert fields["token_logprobs"] == [-token_id / 100 for token_id in token_ids]
    for token, offset in zip(fields["tokens"], fields["text_offset"], strict=True):
        assert ANSWER[offset:].startswith(token)
    assert all(
        token in top for token, top in zip(fields["tokens"], fields["top_logprobs"], strict=True)
    )


async def test_logprobs_of_a_stream_are_those_of_the_whole(served: Served) -> None:
    body: dict[str, Any] = {"logprobs": 1, "echo": True, "n": 2, "prompt": "Hello there"}
    whole = (await complete(served, **body)).json()["choices"]
    *chunks, _ = await stream(served, "/v1/completions", **body)
    for expected in whole:
        fields: dict[str, list[object]] = {name: [] for name in expected["logprobs"]}
        for chunk in chunks:
            for choice in chunk["choices"]:
                if choice["index"] == expected["index"] and choice["logprobs"]:
                    for name, values in choice["logprobs"].items():
                        fields[name] += values
        assert fields == expected["logprobs"]


async def test_echo_with_logprobs_begins_with_the_prompt_and_a_null(
    served: Served, tokenizer: Tokenizer
) -> None:
    (choice,) = (await complete(served, logprobs=0, echo=True)).json()["choices"]
    fields = choice["logprobs"]
    prompt = tokenizer.encode("Hello")
    assert choice["text"] == "Hello" + ANSWER
    assert fields["token_logprobs"][0] is None
    assert fields["top_logprobs"][0] is None
    assert fields["token_logprobs"][1 : len(prompt)] == [-token / 100 for token in prompt[1:]]
    assert "".join(fields["tokens"]) == "Hello" + ANSWER


async def test_prompt_logprobs_have_an_entry_a_token_the_first_null(
    served: Served, tokenizer: Tokenizer
) -> None:
    (choice,) = (await complete(served, prompt_logprobs=1, prompt="Hello there")).json()["choices"]
    prompt = tokenizer.encode("Hello there")
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [str(token) in entry for token, entry in zip(prompt[1:], others, strict=True)]
    assert choice["logprobs"] is None


async def test_a_token_that_is_part_of_a_character_is_named_by_its_bytes(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    engine.script = answer("é\N{PILE OF POO}x", tokenizer)
    (choice,) = (await complete(served, logprobs=0)).json()["choices"]
    fields = choice["logprobs"]
    assert r"bytes:\xf0" in "".join(fields["tokens"])
    assert fields["tokens"][-1] == "x"
    assert fields["text_offset"][-1] == 2
