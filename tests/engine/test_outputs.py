"""From token ids to what the user sees."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.engine.outputs import CompletionDelta, FailedSample, OutputProcessor
from shoal.model.tokenizer import Tokenizer
from shoal.request import FinishReason, Request, SamplingParams, TokenLogprob
from shoal.scheduler.interface import RequestOutput, RequestTimes

QUICK = "The quick brown fox jumps"


class Answer:
    """Feeds tokens to an `OutputProcessor`, as an engine would, and keeps what comes out."""

    def __init__(self, tokenizer: Tokenizer, **params: Any) -> None:
        self.params = SamplingParams(**params)
        self.processor = OutputProcessor(tokenizer, clock=lambda: 9.0)
        self.request = Request("r/0", [1, 2, 3], self.params, 100, seed=0, arrival_time=1.0)
        self.processor.add("r", [self.request])
        self.deltas: list[CompletionDelta] = []
        self.aborted: list[str] = []

    def feed(self, token_ids: list[int], **output: Any) -> None:
        """One output of the engine."""
        logprobs = (
            [TokenLogprob(i, -1.0) for i in token_ids] if self.params.logprobs is not None else []
        )
        processed = self.processor.process(
            [
                RequestOutput(
                    request_id="r/0", new_token_ids=token_ids, new_logprobs=logprobs, **output
                )
            ]
        )
        self.deltas += [item for _, item in processed.items if isinstance(item, CompletionDelta)]
        self.aborted += processed.stopped_ids

    def feed_one_by_one(self, token_ids: list[int]) -> None:
        for token_id in token_ids:
            self.feed([token_id])

    def finish(self, reason: FinishReason = FinishReason.LENGTH, **output: Any) -> None:
        self.feed([], finish_reason=reason, **output)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_deltas_add_up_to_the_decoded_tokens(tokenizer: Tokenizer) -> None:
    text = "Äpfel, 東京 👩‍👩‍👧 한국어"
    answer = Answer(tokenizer)
    answer.feed_one_by_one(encode(tokenizer, text))
    answer.finish()
    assert answer.text == text
    assert all("\ufffd" not in delta.text for delta in answer.deltas)


def test_an_incomplete_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer)
    answer.feed_one_by_one(encode(tokenizer, "a👩")[:-1])
    answer.finish()
    assert answer.text == "a\ufffd"


def test_a_stop_string_of_many_tokens_never_shows(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, stop=("own fox",))
    token_ids = encode(tokenizer, QUICK)
    answer.feed_one_by_one(token_ids)
    last = answer.deltas[-1]
    assert answer.text == "The quick br"
    assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, "own fox")
    assert answer.aborted == ["r/0"]


def test_ids_and_logprobs_end_with_the_token_that_completes_the_stop_string(
    tokenizer: Tokenizer,
) -> None:
    token_ids = encode(tokenizer, QUICK)
    completing = next(
        count for count in range(len(token_ids)) if "own fox" in tokenizer.decode(token_ids[:count])
    )
    one_by_one, at_once = (Answer(tokenizer, stop=("own fox",), logprobs=0) for _ in range(2))
    one_by_one.feed_one_by_one(token_ids)
    at_once.feed(token_ids)
    for answer in (one_by_one, at_once):
        assert answer.text == "The quick br"
        assert answer.token_ids == token_ids[:completing]
        logprobs = [entry for delta in answer.deltas for entry in delta.logprobs or []]
        assert [entry.token_id for entry in logprobs] == answer.token_ids


def test_what_follows_a_stop_string_is_dropped(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, stop=("fox",))
    answer.feed_one_by_one(encode(tokenizer, QUICK))
    num_deltas = len(answer.deltas)
    answer.finish(FinishReason.ABORT)
    assert len(answer.deltas) == num_deltas
    assert sum(delta.finish_reason is not None for delta in answer.deltas) == 1


def test_the_stop_string_is_shown_when_asked_for(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, stop=("own fox",), include_stop_str_in_output=True)
    answer.feed_one_by_one(encode(tokenizer, QUICK))
    assert answer.text == "The quick brown fox"


def test_held_text_comes_out_when_the_answer_ends_otherwise(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, stop=("jumps over",))
    answer.feed_one_by_one(encode(tokenizer, QUICK))
    answer.finish()
    assert answer.text == QUICK
    assert answer.deltas[-1].finish_reason is FinishReason.LENGTH
    assert answer.aborted == []


def test_a_stop_string_in_the_last_permitted_token_is_a_stop(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, stop=("fox",))
    *head, tail = encode(tokenizer, "The fox")
    answer.feed_one_by_one(head)
    answer.feed([tail], finish_reason=FinishReason.LENGTH)
    assert answer.deltas[-1].finish_reason is FinishReason.STOP
    assert answer.aborted == []  # it has ended anyway


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_a_stop_string_that_is_a_special_token_stops_though_it_is_hidden(
    tokenizer: Tokenizer, skip_special_tokens: bool
) -> None:
    answer = Answer(tokenizer, stop=("xyz", "<|im_end|>"), skip_special_tokens=skip_special_tokens)
    answer.feed_one_by_one(encode(tokenizer, "Hi xy<|im_end|>more"))
    assert answer.text == "Hi xy"
    assert answer.deltas[-1].stop_reason == "<|im_end|>"


def test_what_the_first_min_tokens_say_does_not_stop(tokenizer: Tokenizer) -> None:
    token_ids = encode(tokenizer, "fox fox fox")
    per_word = len(encode(tokenizer, "fox fox")) - len(encode(tokenizer, "fox"))
    answer = Answer(tokenizer, stop=("fox",), min_tokens=len(token_ids) - per_word)
    answer.feed_one_by_one(token_ids)
    assert answer.text == "fox fox "
    assert answer.token_ids == token_ids


@pytest.mark.parametrize(("include", "text"), [(False, "Hi"), (True, "Hi there")])
def test_a_stop_token_is_counted_but_not_shown(
    tokenizer: Tokenizer, include: bool, text: str
) -> None:
    tokens = encode(tokenizer, "Hi"), encode(tokenizer, " there")
    stop_token_id = tokens[1][-1]
    answer = Answer(tokenizer, stop_token_ids=(stop_token_id,), include_stop_str_in_output=include)
    answer.feed_one_by_one(tokens[0] + tokens[1][:-1])
    answer.feed([stop_token_id], finish_reason=FinishReason.STOP, stop_token_id=stop_token_id)
    shown = tokens[0] + (tokens[1] if include else tokens[1][:-1])
    assert answer.text == tokenizer.decode(shown)
    assert answer.token_ids == tokens[0] + tokens[1]
    assert answer.deltas[-1].stop_reason == stop_token_id


def test_an_end_token_has_no_stop_reason(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer)
    answer.feed([5])
    answer.feed([2], finish_reason=FinishReason.STOP, stop_token_id=2)
    assert answer.deltas[-1].stop_reason is None


def test_prompt_logprobs_come_once_and_complete(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, prompt_logprobs=0)
    entries = [TokenLogprob(2, -1.0), TokenLogprob(3, -2.0)]
    answer.feed([], prompt_logprobs=entries[:1])
    assert answer.deltas == []
    answer.feed([5], prompt_logprobs=entries[1:])
    answer.feed([6])
    assert [delta.prompt_logprobs for delta in answer.deltas] == [entries, None]


def test_the_first_delta_and_the_last_have_the_times(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, stop=("fox",))
    tokens = encode(tokenizer, "The fox")
    times = RequestTimes(arrival=1.0, first_scheduled=3.0, first_token=4.0)
    answer.feed(tokens[:1], times=times)
    answer.feed(tokens[1:])
    for delta in (answer.deltas[0], answer.deltas[-1]):
        metrics = delta.metrics
        assert metrics is not None
        assert (metrics.queue_time, metrics.prefill_time, metrics.ttft) == (2.0, 1.0, 3.0)
        assert (metrics.decode_time, metrics.e2e_time) == (5.0, 8.0)  # the clock says 9
    assert all(delta.metrics is None for delta in answer.deltas[1:-1])


def test_a_failed_sample_says_why(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer)
    processed = answer.processor.process(
        [RequestOutput(request_id="r/0", finish_reason=FinishReason.ERROR, error="not finite")]
    )
    assert processed.items == [("r", FailedSample(index=0, error="not finite"))]
    assert answer.processor.remove([answer.request]) == []


def test_requests_do_not_share_text(tokenizer: Tokenizer) -> None:
    processor = OutputProcessor(tokenizer)
    requests = [
        Request(f"r/{i}", [1], SamplingParams(n=2), 100, seed=0, sample_index=i) for i in range(2)
    ]
    processor.add("r", requests)
    texts = {0: "", 1: ""}
    words = [encode(tokenizer, "東京"), encode(tokenizer, "한국어")]
    for position in range(max(map(len, words))):
        outputs = [
            RequestOutput(request_id=f"r/{i}", new_token_ids=[word[position]])
            for i, word in enumerate(words)
            if position < len(word)
        ]
        for _, item in processor.process(outputs).items:
            assert isinstance(item, CompletionDelta)
            texts[item.index] += item.text
    assert texts == {0: "東京", 1: "한국어"}
