"""Response bodies and stream chunks of the OpenAI-compatible endpoints."""

from __future__ import annotations

from typing import Literal

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How the prompt's tokens were served."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request; a prompt counts once however many samples it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


MaybeUsage = Usage | None | msgspec.UnsetType  # unset: the key is left out


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's time went, in seconds from its arrival at the engine.

    Queue, prefill and decode follow one another: to the first step, to the first token, to the end.
    With several choices: of the first that started, the first token of any, the end of the last.
    None for a part that was never reached.
    """

    queue_time: float | None
    prefill_time: float | None
    decode_time: float | None
    ttft: float | None  # queue_time + prefill_time
    e2e_time: float
    num_preemptions: int


MaybeTimeline = Timeline | None | msgspec.UnsetType


class PromptLogprob(msgspec.Struct, frozen=True):
    """The log-probability of one candidate at a prompt position."""

    logprob: float
    decoded_token: str


# One entry a prompt token, by token id: the token itself first. Nothing predicts the first token.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    """Aligned lists, one entry a token; `text_offset` counts characters of the choice's text.

    `top_logprobs` holds the chosen token beside its alternatives.
    """

    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] = []

    def extend(self, other: CompletionLogprobs) -> None:
        """Append the tokens of `other`."""
        self.text_offset += other.text_offset
        self.token_logprobs += other.token_logprobs
        self.tokens += other.tokens
        self.top_logprobs += other.top_logprobs


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One sample of one prompt: `index` is prompt index * n + sample index."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The answer of /v1/completions, and a chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: MaybeUsage = msgspec.UNSET
    metrics: MaybeTimeline = msgspec.UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative at a position of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen token at a position of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log-probabilities of a chat choice, one entry a token."""

    content: list[ChatLogprob]


class ChatMessage(msgspec.Struct, kw_only=True):
    """The assistant's message."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(msgspec.Struct, kw_only=True):
    """One sample of a chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatCompletion(msgspec.Struct, kw_only=True):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Timeline | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """A choice in a chunk of a chat stream; `finish_reason` is always present."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """A chunk of a chat stream."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: MaybeUsage = msgspec.UNSET
    metrics: MaybeTimeline = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["shoal"] = "shoal"
    max_model_len: int | None = None  # unknown until the model is loaded


class ModelList(msgspec.Struct, kw_only=True):
    """The served models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(msgspec.Struct, kw_only=True):
    """The answer of /tokenize."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(msgspec.Struct, kw_only=True):
    """The answer of /detokenize."""

    prompt: str


class PrefixCacheReset(msgspec.Struct, kw_only=True):
    """The answer of /reset_prefix_cache."""

    num_blocks: int  # forgotten
