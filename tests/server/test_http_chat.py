"""POST /v1/chat/completions: messages, roles, logprobs, streams."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine, Served, stream

from shoal.model.chat import ChatTemplate
from shoal.model.tokenizer import Tokenizer

ANSWER = "The capital of France is Paris."
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PATH = "/v1/chat/completions"


async def chat(served: Served, **body: Any) -> httpx.Response:
    return await served.client.post(PATH, json={"messages": QUESTION} | body)


async def test_the_answer_is_an_assistants_message(served: Served) -> None:
    answer = (await chat(served)).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]


async def test_the_prompt_is_exactly_the_templates(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    await chat(served)
    text = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert engine.requests[0][0] == tokenizer.encode(text, add_special_tokens=False)


async def test_text_parts_are_joined_by_newlines_and_developer_means_system(
    served: Served, engine: FakeEngine, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await chat(served, messages=[{"role": "developer", "content": parts}])
    assert "<|im_start|>system\na\nb<|im_end|>" in tokenizer.decode(engine.requests[0][0], False)


async def test_without_a_limit_the_answer_may_fill_the_context(
    served: Served, engine: FakeEngine
) -> None:
    await chat(served)
    await chat(served, max_tokens=7)
    await chat(served, max_completion_tokens=8)
    assert [params.max_tokens for _, params in engine.requests] == [None, 7, 8]


async def test_a_stream_begins_with_the_role_and_has_one_finish_a_choice(served: Served) -> None:
    *chunks, done = await stream(served, PATH, messages=QUESTION, n=2)
    assert done == "[DONE]"
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in choices[1:])
        assert "".join(choice["delta"].get("content", "") for choice in choices) == ANSWER
        assert [choice["finish_reason"] for choice in choices][-1] == "stop"
        assert sum(choice["finish_reason"] is not None for choice in choices) == 1
    assert all("finish_reason" in c for chunk in chunks for c in chunk["choices"])


async def test_the_usage_chunk_comes_only_when_asked(served: Served) -> None:
    *_, last, _ = await stream(
        served, PATH, messages=QUESTION, stream_options={"include_usage": True}
    )
    *unasked, _ = await stream(served, PATH, messages=QUESTION)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert all(chunk["choices"] and "usage" not in chunk for chunk in unasked)


async def test_logprobs_have_bytes_and_alternatives(served: Served) -> None:
    (choice,) = (await chat(served, logprobs=True, top_logprobs=2)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == ANSWER
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)


async def test_a_model_without_a_template_is_refused(served: Served, engine: FakeEngine) -> None:
    engine.chat_template = None
    response = await chat(served)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "no_chat_template"


async def test_the_templates_own_error_reaches_the_client(
    served: Served, engine: FakeEngine
) -> None:
    engine.chat_template = ChatTemplate("{{ raise_exception('Roles must alternate.') }}", "", "")
    for streamed in (False, True):
        response = await chat(served, stream=streamed)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "Roles must alternate."
        assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    served: Served, engine: FakeEngine, body: dict[str, Any], param: str
) -> None:
    response = await chat(served, **body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert engine.requests == []


async def test_what_changes_nothing_is_accepted(served: Served) -> None:
    response = await chat(
        served,
        user="u",
        metadata={"a": "b"},
        store=False,
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        service_tier="auto",
        stream_options=None,
        temperature=None,
    )
    assert response.status_code == 200
