"""POST /tokenize and /detokenize, and the way from text and messages to token ids."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.model.tokenizer import Tokenizer
from shoal.server.connection import read_body
from shoal.server.errors import bad_request
from shoal.server.protocol import DetokenizeBody, Message, TokenizeBody, decode
from shoal.server.responses import Detokenized, Tokenized
from shoal.server.state import ServerState

# Encoding this many characters takes about a millisecond. A longer text goes to a thread, so that
# the event loop keeps answering; a shorter one isn't worth the switch.
INLINE_CHARS = 4096

_tokenize_decoder = msgspec.json.Decoder(TokenizeBody)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeBody)


async def tokenize(request: Request) -> Response:
    """The token ids of a text, or of messages put through the chat template."""
    state: ServerState = request.app.state.server
    state.require_ready()
    body = decode(_tokenize_decoder, await read_body(request))
    state.resolve_model(body.model)
    if body.messages is not None:
        tokens = await encode_chat(
            state, body.messages, add_generation_prompt=body.add_generation_prompt
        )
    else:
        tokens = await encode(
            state.engine.tokenizer,
            body.prompt or "",
            add_special_tokens=body.add_special_tokens,
        )
    answer = Tokenized(
        tokens=tokens, count=len(tokens), max_model_len=state.engine.info.max_model_len
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state: ServerState = request.app.state.server
    state.require_ready()
    body = decode(_detokenize_decoder, await read_body(request))
    state.resolve_model(body.model)
    tokenizer = state.engine.tokenizer
    for token_id in body.tokens:
        if not 0 <= token_id < tokenizer.vocab_size:
            raise bad_request(
                f"The token id {token_id} is not between 0 and {tokenizer.vocab_size - 1}.",
                "tokens",
            )
    text = tokenizer.decode(body.tokens, body.skip_special_tokens)
    return Response(msgspec.json.encode(Detokenized(prompt=text)), media_type="application/json")


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text."""
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


async def encode_chat(
    state: ServerState, messages: list[Message], *, add_generation_prompt: bool = True
) -> list[int]:
    """The token ids of messages: exactly the template's, it brings its own special tokens.

    Raises:
        ApiError: the model has no chat template.
        ChatTemplateError: the template refuses the messages.
    """
    if (template := state.engine.chat_template) is None:
        raise bad_request(
            "The model has no chat template; use /v1/completions.", "messages", "no_chat_template"
        )
    text = template.render(
        [message.for_template() for message in messages],
        add_generation_prompt=add_generation_prompt,
    )
    return await encode(state.engine.tokenizer, text, add_special_tokens=False)
