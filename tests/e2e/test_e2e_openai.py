"""The `openai` client against the real server with the real model."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from server_process import ServerProcess, until

pytestmark = pytest.mark.e2e

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


@pytest.fixture
def model(server: ServerProcess) -> str:
    with server.client() as client:
        name: str = client.get("/v1/models").json()["data"][0]["id"]
    return name


@pytest.fixture
def api(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as api:
        yield api
    until(server.is_idle)


@pytest.fixture
def async_api(server: ServerProcess) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_chat_answers_tokyo(api: openai.OpenAI, model: str) -> None:
    answer = api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32
    )
    assert "Tokyo" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 32


def test_a_streamed_chat_is_the_same_answer(api: openai.OpenAI, model: str) -> None:
    whole = api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32
    )
    stream = api.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "Tokyo" in text
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert last.choices == []
    assert last.usage == whole.usage


async def test_the_asynchronous_client_chats_streamed_and_not(
    async_api: openai.AsyncOpenAI, model: str
) -> None:
    whole = await async_api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32
    )
    stream = await async_api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=32, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Tokyo" in text
    assert text == whole.choices[0].message.content


def test_a_completion_goes_on_streamed_and_not(api: openai.OpenAI, model: str) -> None:
    prompt = "The capital of France is"
    whole = api.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=12)
    stream = api.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=12, stream=True
    )
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert "Paris" in text
    assert text == whole.choices[0].text


async def test_the_asynchronous_client_completes_streamed_and_not(
    async_api: openai.AsyncOpenAI, model: str
) -> None:
    prompt = "The capital of France is"
    whole = await async_api.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=12
    )
    stream = await async_api.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=12, stream=True
    )
    text = "".join([chunk.choices[0].text async for chunk in stream])
    assert text == whole.choices[0].text


def test_chat_logprobs_are_typed_and_sum_below_one(api: openai.OpenAI, model: str) -> None:
    answer = api.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy takes the likeliest
        assert entry.logprob <= 0


def test_errors_arrive_as_the_clients_exceptions(api: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        api.chat.completions.create(model=model, messages=QUESTION, n=0, stream=True)
    assert bad.value.param == "n"
    with pytest.raises(openai.NotFoundError, match=model):
        api.chat.completions.create(model="nope", messages=QUESTION)


def test_the_models_are_listed(api: openai.OpenAI, model: str) -> None:
    assert [entry.id for entry in api.models.list()] == [model]
    assert api.models.retrieve(model).id == model
