"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.engine.outputs import CompletionDelta
from shoal.request import TokenLogprob
from shoal.server.connection import EventStream, event, read_body, run_while_connected
from shoal.server.generation import Generation
from shoal.server.logprobs import chat_logprobs, prompt_logprobs_by_id
from shoal.server.protocol import ChatBody, decode
from shoal.server.record import record_of
from shoal.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatMessage,
    MaybeUsage,
    PromptLogprobs,
)
from shoal.server.state import ServerState
from shoal.server.tokenization import encode_chat

_decoder = msgspec.json.Decoder(ChatBody)
_to_json = msgspec.json.Encoder().encode


async def create_chat_completion(request: Request) -> Response:
    """Answer a chat."""
    state: ServerState = request.app.state.server
    state.require_ready()
    body = decode(_decoder, await read_body(request))
    model = state.resolve_model(body.model)
    params = body.to_sampling_params()
    token_ids = await encode_chat(state, body.messages)
    generation = Generation(state, record_of(request), [token_ids], params, body.request_options())
    answer = _Answer(model, body, generation)
    if not body.stream:
        completion = await run_while_connected(state, request.receive, answer.whole())
        return Response(_to_json(completion), media_type="application/json")
    events = answer.events()
    first = await run_while_connected(state, request.receive, anext(events))
    return EventStream(state, record_of(request), first, events)


@dataclass(slots=True)
class _Message:
    """The message of one choice as it grows."""

    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(slots=True)
class _Answer:
    """Turns the deltas of a generation into one body or into events."""

    model: str
    body: ChatBody
    generation: Generation
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"chatcmpl-{self.generation.record.request_id}"

    async def whole(self) -> ChatCompletion:
        """The answer in one body."""
        messages = [_Message() for _ in range(self.generation.num_choices)]
        prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                message = messages[index]
                message.texts.append(delta.text)
                message.logprobs += delta.logprobs or ()
                message.finish_reason = delta.finish_reason
                message.stop_reason = delta.stop_reason
                if delta.prompt_logprobs is not None:
                    prompt_logprobs = self._prompt_logprobs(delta.prompt_logprobs)
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[self._choice(index, message) for index, message in enumerate(messages)],
            usage=self.generation.usage(),
            metrics=self.generation.record.timeline(),
            prompt_logprobs=prompt_logprobs,
        )

    def _choice(self, index: int, message: _Message) -> ChatChoice:
        tokenizer = self.generation.tokenizer
        return ChatChoice(
            index=index,
            message=ChatMessage(content="".join(message.texts)),
            logprobs=chat_logprobs(tokenizer, message.logprobs) if self.body.logprobs else None,
            finish_reason=message.finish_reason,
            stop_reason=message.stop_reason,
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events: a choice begins with its role.

        An event with usage and times comes last if it is wanted.
        """
        usage = None if self.body.include_usage else msgspec.UNSET
        started: set[int] = set()
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                role = b""
                if index not in started:
                    started.add(index)
                    role = event(_to_json(self._role_chunk(index, delta, usage)))
                if delta.text or delta.logprobs or delta.finish_reason:
                    yield role + event(_to_json(self._chunk([self._piece(index, delta)], usage)))
                elif role:
                    yield role
        if self.body.include_usage:
            last = self._chunk([], self.generation.usage())
            last.metrics = self.generation.record.timeline()
            yield event(_to_json(last))

    def _role_chunk(self, index: int, delta: CompletionDelta, usage: MaybeUsage) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        chunk = self._chunk([choice], usage)
        if delta.prompt_logprobs is not None:
            chunk.prompt_logprobs = self._prompt_logprobs(delta.prompt_logprobs)
        return chunk

    def _piece(self, index: int, delta: CompletionDelta) -> ChatChunkChoice:
        logprobs = None
        if self.body.logprobs and delta.logprobs:
            logprobs = chat_logprobs(self.generation.tokenizer, delta.logprobs)
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=delta.text or None),
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: MaybeUsage) -> ChatChunk:
        return ChatChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _prompt_logprobs(self, entries: list[TokenLogprob]) -> PromptLogprobs:
        # Nothing predicts the first token.
        return prompt_logprobs_by_id(
            self.generation.tokenizer, [None, *entries], self.body.prompt_logprobs or 0
        )
