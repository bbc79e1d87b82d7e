"""Log-probabilities in the shapes of the two generation endpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.model.detokenizer import IncrementalDetokenizer
from shoal.model.tokenizer import Tokenizer
from shoal.request import TokenLogprob
from shoal.server.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    r"""The token as text; one that holds a part of a character is written `bytes:\xf0\x9f`."""
    spelled = tokenizer.token_bytes(token_id)
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def prompt_logprobs_by_id(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprob | None], num_top: int
) -> PromptLogprobs:
    """The `prompt_logprobs` field: by token id the prompt's token and its alternatives."""
    return [None if entry is None else _by_id(tokenizer, entry, num_top) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprob, num_top: int) -> dict[int, PromptLogprob]:
    return {
        token_id: PromptLogprob(logprob, token_name(tokenizer, token_id))
        for token_id, logprob in _chosen_and_top(entry, num_top)
    }


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> ChatLogprobs:
    """The `logprobs` field of a chat choice."""
    return ChatLogprobs(
        [
            ChatLogprob(
                token=token_name(tokenizer, entry.token_id),
                logprob=entry.logprob,
                bytes=list(tokenizer.token_bytes(entry.token_id)),
                top_logprobs=[
                    TopLogprob(
                        token=token_name(tokenizer, token_id),
                        logprob=logprob,
                        bytes=list(tokenizer.token_bytes(token_id)),
                    )
                    for token_id, logprob in entry.top
                ],
            )
            for entry in entries
        ]
    )


class CompletionLogprobWriter:
    """Makes the `logprobs` fields of one choice of /v1/completions, chunk by chunk."""

    def __init__(
        self, tokenizer: Tokenizer, num_top: int, detokenizer: IncrementalDetokenizer
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = detokenizer
        self._offset = 0

    def write(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs:
        """The fields of the next tokens; an entry is None where nothing predicts the token."""
        fields = CompletionLogprobs()
        for token_id, entry in zip(token_ids, entries, strict=True):
            fields.text_offset.append(self._offset)
            fields.tokens.append(token_name(self._tokenizer, token_id))
            fields.token_logprobs.append(None if entry is None else entry.logprob)
            fields.top_logprobs.append(None if entry is None else self._top(entry))
            self._offset += len(self._detokenizer.push([token_id]))
        return fields

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        return {
            token_name(self._tokenizer, token_id): logprob
            for token_id, logprob in _chosen_and_top(entry, self._num_top)
        }


def _chosen_and_top(entry: TokenLogprob, num_top: int) -> list[tuple[int, float]]:
    return [(entry.token_id, entry.logprob), *entry.top[:num_top]]
