"""The text of one answer as its tokens come: whole characters, and nothing of a stop string."""

from __future__ import annotations

from shoal.engine.stop_strings import StopMatch, StopStringFinder
from shoal.model.detokenizer import IncrementalDetokenizer
from shoal.model.tokenizer import Tokenizer
from shoal.request import SamplingParams


class TextStream:
    """Turns tokens into text until a stop string is complete; then `matched_stop` names it.

    A stop string that is the text of a special token also matches that token's id, since
    skip_special_tokens keeps its text from ever appearing. What the first `min_tokens` tokens say
    is not searched.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, params.skip_special_tokens, continues_text=True
        )
        self._finder = StopStringFinder(params.stop)
        self._special_stops = _special_stops(params.stop, tokenizer)
        self._num_tokens = 0
        self.matched_stop: str | None = None

    def push(self, token_id: int) -> str:
        """The text that this token makes certain; the last one when it sets `matched_stop`."""
        self._num_tokens += 1
        stop = self._special_stops.get(token_id)
        if stop is None or not self._is_searching:
            return self._search(self._detokenizer.push([token_id]))
        text = self.end()
        if self.matched_stop is None:
            text += self._match(stop)
        return text

    def end(self) -> str:
        """The text that was held back, when no token follows."""
        text = self._search(self._detokenizer.flush())
        return text if self.matched_stop is not None else text + self._finder.flush()

    @property
    def _is_searching(self) -> bool:
        return self._num_tokens > self._params.min_tokens

    def _search(self, text: str) -> str:
        if not self._is_searching:
            return text
        found = self._finder.push(text)
        if isinstance(found, StopMatch):
            return found.text + self._match(found.stop)
        return found

    def _match(self, stop: str) -> str:
        """Note the match; returns what of the stop string is to be shown."""
        self.matched_stop = stop
        return stop if self._params.include_stop_str_in_output else ""


def _special_stops(stops: tuple[str, ...], tokenizer: Tokenizer) -> dict[int, str]:
    """The stop strings that are special tokens, by token id."""
    found = {}
    for stop in stops:
        token_id = tokenizer.special_token_id(stop)
        if token_id is not None:
            found[token_id] = stop
    return found
