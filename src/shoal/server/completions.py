"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.engine.outputs import CompletionDelta
from shoal.model.detokenizer import IncrementalDetokenizer
from shoal.request import TokenLogprob
from shoal.server.connection import EventStream, event, read_body, run_while_connected
from shoal.server.generation import Generation
from shoal.server.logprobs import (
    CompletionLogprobWriter,
    prompt_logprobs_by_id,
)
from shoal.server.protocol import CompletionBody, decode
from shoal.server.record import record_of
from shoal.server.responses import Completion, CompletionChoice, MaybeUsage
from shoal.server.state import ServerState
from shoal.server.tokenization import encode

_decoder = msgspec.json.Decoder(CompletionBody)
_to_json = msgspec.json.Encoder().encode


async def create_completion(request: Request) -> Response:
    """Complete one or several prompts."""
    state: ServerState = request.app.state.server
    state.require_ready()
    body = decode(_decoder, await read_body(request))
    answer = await _prepare(state, request, body)
    if not body.stream:
        completion = await run_while_connected(state, request.receive, answer.whole())
        return Response(_to_json(completion), media_type="application/json")
    events = answer.events()
    first = await run_while_connected(state, request.receive, anext(events))
    return EventStream(state, record_of(request), first, events)


async def _prepare(state: ServerState, request: Request, body: CompletionBody) -> _Answer:
    model = state.resolve_model(body.model)
    params = body.to_sampling_params()
    if body.echo and body.logprobs is not None:
        wanted = max(body.logprobs, body.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=wanted)
    prompts = body.prompts()
    tokenizer = state.engine.tokenizer
    token_ids = [
        await encode(tokenizer, prompt) if isinstance(prompt, str) else prompt for prompt in prompts
    ]
    echoes = [
        prompt if isinstance(prompt, str) else tokenizer.decode(prompt, params.skip_special_tokens)
        for prompt in (prompts if body.echo else ())
    ]
    generation = Generation(state, record_of(request), token_ids, params, body.request_options())
    return _Answer(model, body, generation, echoes)


@dataclass(slots=True)
class _Choice:
    """A choice under way."""

    prompt_index: int
    writer: CompletionLogprobWriter | None
    started: bool = False


@dataclass(slots=True)
class _Answer:
    """Turns the deltas of a generation into one body or into events.

    `echoes` holds the text of each prompt if the answer begins with it, else nothing.
    """

    model: str
    body: CompletionBody
    generation: Generation
    echoes: list[str]
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))
    _choices: list[_Choice] = field(init=False)
    _prompt_logprobs: dict[int, list[TokenLogprob | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.id = f"cmpl-{self.generation.record.request_id}"
        self._choices = [
            _Choice(index // self.generation.params.n, self._new_writer())
            for index in range(self.generation.num_choices)
        ]

    def _new_writer(self) -> CompletionLogprobWriter | None:
        if self.body.logprobs is None:
            return None
        return CompletionLogprobWriter(
            self.generation.tokenizer,
            self.body.logprobs,
            IncrementalDetokenizer(
                self.generation.tokenizer,
                self.generation.params.skip_special_tokens,
                continues_text=not self.echoes,
            ),
        )

    async def whole(self) -> Completion:
        """The answer in one body."""
        pieces: list[list[CompletionChoice]] = [[] for _ in self._choices]
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                pieces[index].append(self._piece(index, delta))
        return self._last_body([_join(choice) for choice in pieces])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events; usage and times come last if they are wanted."""
        usage = None if self.body.include_usage else msgspec.UNSET
        async with aclosing(self.generation.deltas()) as deltas:
            async for index, delta in deltas:
                piece = self._piece(index, delta)
                if piece.text or piece.logprobs or piece.finish_reason:
                    yield event(_to_json(self._body([piece], usage)))
        if self.body.include_usage:
            yield event(_to_json(self._last_body([])))

    def _last_body(self, choices: list[CompletionChoice]) -> Completion:
        """The body that has what is known at the end: usage and times."""
        body = self._body(choices, self.generation.usage())
        body.metrics = self.generation.record.timeline()
        return body

    def _body(self, choices: list[CompletionChoice], usage: MaybeUsage) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def _piece(self, index: int, delta: CompletionDelta) -> CompletionChoice:
        """What a delta adds to its choice; the first one brings what concerns the prompt."""
        choice = self._choices[index]
        piece = CompletionChoice(
            index=index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if not choice.started:
            choice.started = True
            self._begin(choice, piece, delta)
        if choice.writer is not None and delta.logprobs:
            fields = choice.writer.write(delta.token_ids, delta.logprobs)
            if piece.logprobs is not None:
                piece.logprobs.extend(fields)
            else:
                piece.logprobs = fields
        return piece

    def _begin(self, choice: _Choice, piece: CompletionChoice, delta: CompletionDelta) -> None:
        """Put what concerns the prompt into a choice's first piece."""
        if self.echoes:
            piece.text = self.echoes[choice.prompt_index] + piece.text
        if self.generation.params.prompt_logprobs is None:
            return
        if delta.index == 0:
            # Nothing predicts the first token.
            self._prompt_logprobs[choice.prompt_index] = [None, *(delta.prompt_logprobs or ())]
        entries = self._prompt_logprobs[choice.prompt_index]
        if self.echoes and choice.writer is not None:
            prompt = self.generation.prompts[choice.prompt_index]
            piece.logprobs = choice.writer.write(prompt, entries)
        if (num_top := self.body.prompt_logprobs) is not None:
            piece.prompt_logprobs = prompt_logprobs_by_id(
                self.generation.tokenizer, entries, num_top
            )


def _join(pieces: list[CompletionChoice]) -> CompletionChoice:
    """One choice out of its pieces."""
    first, last = pieces[0], pieces[-1]
    first.text = "".join(piece.text for piece in pieces)
    first.finish_reason, first.stop_reason = last.finish_reason, last.stop_reason
    for piece in pieces[1:]:
        if piece.logprobs is not None and first.logprobs is not None:
            first.logprobs.extend(piece.logprobs)
    return first
