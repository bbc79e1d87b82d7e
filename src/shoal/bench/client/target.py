"""The server under test: what it is called, what prompts it takes, and what it can do."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from cyclopts import Parameter

from shoal.bench.client.connection import HttpClient, TransportError
from shoal.bench.client.stream import error_message
from shoal.bench.errors import BenchError
from shoal.bench.workloads.prompts import WORDS, Prompt, Vocabulary
from shoal.bench.workloads.workload import WorkloadRequest
from shoal.config import ConfigError

Endpoint = Literal["completions", "chat"]
PromptForm = Literal["auto", "tokens", "text"]

MAX_ANSWER_SECONDS = 30.0
"""Of what is asked besides generations; a server under load may take seconds."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    """Which server is asked, and how.

    Raises:
        ConfigError: a value is outside its range, or two settings contradict each other.
    """

    base_url: str = "http://127.0.0.1:8000"
    """Where the server is; a /v1 at the end makes no difference."""

    model: str | None = None
    """Name of the model in the API; the first that the server lists when not set."""

    api_key: str | None = field(default=None, repr=False)
    """Key to send as a bearer token; SHOAL_API_KEY when not set."""

    endpoint: Endpoint = "completions"
    """Which endpoint: /v1/completions or /v1/chat/completions."""

    prompt_form: PromptForm = "auto"
    """Token ids, which have exact lengths, or text of common words, about a token each. By default
    token ids if the endpoint takes them and the server's /tokenize tells some."""

    ignore_eos: bool = True
    """Answers get exactly their length. Without it the model may end them earlier; for servers
    that refuse the parameter of that name."""

    request_timeout: float = 600.0
    """Seconds after which a request is given up and counted as failed."""

    def __post_init__(self) -> None:
        if self.endpoint == "chat" and self.prompt_form == "tokens":
            raise ConfigError("prompt_form tokens contradicts endpoint chat: messages are text")
        if not self.request_timeout > 0:
            raise ConfigError(f"request_timeout must be above 0, got {self.request_timeout}")


@dataclass(frozen=True, slots=True)
class Target:
    """A server that has been asked what it is; made by `connect`.

    `vocabulary` is what prompts are made of: token ids or words.
    """

    client: HttpClient
    config: TargetConfig
    model: str
    vocabulary: Vocabulary

    @property
    def path(self) -> str:
        """The path of the endpoint."""
        return "/v1/chat/completions" if self.config.endpoint == "chat" else "/v1/completions"

    @property
    def prompt_form(self) -> str:
        """What random prompts are made of: "tokens" or "text"."""
        return "text" if isinstance(self.vocabulary[0], str) else "tokens"

    def request(self, request: WorkloadRequest) -> bytes:
        """The bytes that ask for a greedy, streamed answer with its usage."""
        content: dict[str, Any] = {
            "model": self.model,
            **self._prompt(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.config.ignore_eos:
            content["ignore_eos"] = True
        return self.client.post(self.path, msgspec.json.encode(content))

    def _prompt(self, prompt: Prompt) -> Mapping[str, Any]:
        if self.config.endpoint == "chat":
            return {"messages": [{"role": "user", "content": prompt}]}
        return {"prompt": prompt}

    async def reset_prefix_cache(self) -> str:
        """Have the server forget all prompts; returns in words what came of it.

        Raises:
            BenchError: the server can't be reached, or doesn't answer.
        """
        status, answer = await _ask(self.client, "/reset_prefix_cache", {})
        if status == 200:
            return "reset after the warm-up"
        if status in {404, 405, 501}:
            return "not reset: the server has no /reset_prefix_cache"
        return f"not reset: status {status}, {error_message(answer)}"


async def connect(client: HttpClient, config: TargetConfig) -> Target:
    """Ask the server for its model, and for token ids if prompts are to be made of them.

    Raises:
        BenchError: the server can't be reached, doesn't answer, lists no model, or has no /tokenize
            although prompts of token ids are wanted.
    """
    model = config.model if config.model is not None else await _first_model(client)
    vocabulary = await _vocabulary(client, config, model)
    return Target(client, config, model, vocabulary)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def _first_model(client: HttpClient) -> str:
    status, answer = await _ask(client, "/v1/models")
    if status != 200:
        raise BenchError(f"/v1/models answered with status {status}: {error_message(answer)}")
    try:
        models = msgspec.json.decode(answer, type=_Models).data
    except msgspec.DecodeError as error:
        raise BenchError(f"/v1/models didn't answer as OpenAI's API does: {error}") from error
    if not models:
        raise BenchError("the server lists no model; give one")
    return models[0].id


async def _vocabulary(client: HttpClient, config: TargetConfig, model: str) -> Vocabulary:
    if config.endpoint == "chat" or config.prompt_form == "text":
        return WORDS
    text = " ".join(WORDS)
    for body in (
        {"model": model, "prompt": text, "add_special_tokens": False},  # Shoal, vLLM
        {"content": text, "add_special": False},  # llama-server
    ):
        status, answer = await _ask(client, "/tokenize", body)
        if status == 200 and (token_ids := _token_ids(answer)):
            return sorted(set(token_ids))
    if config.prompt_form == "tokens":
        raise BenchError(
            "prompt_form tokens needs a /tokenize that tells token ids, and this server has none"
        )
    return WORDS


def _token_ids(answer: bytes) -> list[int]:
    try:
        return msgspec.json.decode(answer, type=_Tokens).tokens
    except msgspec.DecodeError:
        return []  # another API under the same path


async def _ask(
    client: HttpClient, path: str, body: Mapping[str, Any] | None = None
) -> tuple[int, bytes]:
    """GET `path`, or POST a body to it; returns the status and the answer's body."""
    request = client.get(path) if body is None else client.post(path, msgspec.json.encode(body))
    answer = bytearray()
    try:
        async with asyncio.timeout(MAX_ANSWER_SECONDS):
            response = await client.send(request, lambda piece, _now: answer.extend(piece))
    except TimeoutError as error:
        raise BenchError(
            f"{client.url(path)} gave no complete answer within {MAX_ANSWER_SECONDS:g} s"
        ) from error
    except TransportError as error:
        raise BenchError(str(error)) from error
    return response.status, bytes(answer)
