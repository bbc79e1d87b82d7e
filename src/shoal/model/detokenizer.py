"""Token ids to text as they come, without ever splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from shoal.model.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns the tokens of one request into text, a few at a time.

    The texts that `push` and `flush` return are together exactly `tokenizer.decode` of all ids with
    the same arguments, however the ids are spread over the calls. The bytes of an incomplete
    character are held back until it is complete or can't become so (then they are U+FFFD). The
    work for a token doesn't depend on how many came before.
    """

    __slots__ = ("_decoder", "_skip_special_tokens", "_strip_next_space", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        continues_text: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = _new_decoder(errors="replace")
        self._strip_next_space = tokenizer.strips_leading_space and not continues_text

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is certain now and wasn't before; often a token's, sometimes none."""
        tokenizer, skips = self._tokenizer, self._skip_special_tokens
        spelled = [
            tokenizer.token_bytes(i) for i in token_ids if not (skips and tokenizer.is_special(i))
        ]
        return self._emit(self._decoder.decode(b"".join(spelled)))

    def flush(self) -> str:
        """The rest, when no tokens follow: U+FFFD for a character that stayed incomplete."""
        return self._emit(self._decoder.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if text and self._strip_next_space:
            self._strip_next_space = False
            return text.removeprefix(" ")
        return text
