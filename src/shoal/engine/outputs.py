"""From the engine's outputs to what a user sees: text, stop strings, logprobs, times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shoal.engine.text_stream import TextStream
from shoal.model.tokenizer import Tokenizer
from shoal.request import FinishReason, Request, TokenLogprob
from shoal.scheduler.interface import RequestOutput, RequestTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """How long the parts of a request took, in seconds; None for a part that it hasn't reached.

    While it runs, the last part that it reached, and the whole, last until now.
    """

    queue_time: float | None = None  # from arrival to the first step
    prefill_time: float | None = None  # from the first step to the first token
    decode_time: float | None = None  # from the first token to the end
    ttft: float | None = None  # from arrival to the first token
    e2e_time: float  # from arrival to the end
    num_preemptions: int = 0


@dataclass(slots=True, kw_only=True)
class CompletionDelta:
    """What is new in one of a request's `n` completions.

    `token_ids` holds every token that the model produced, also the ones of a stop string and the
    stop token, which `text` leaves out (unless include_stop_str_in_output): what ended an answer is
    counted but not shown. `text` may be empty, because its characters are incomplete or could
    begin a stop string, and brings later what belongs to earlier tokens.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None  # aligned with token_ids, when asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, stop token id or time limit, if any
    prompt_logprobs: list[TokenLogprob] | None = None  # once and complete, with the first token
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None  # with the first token, and with finish_reason


@dataclass(frozen=True, slots=True)
class FailedSample:
    """A completion that the engine could not go on with."""

    index: int
    error: str
    retry_after: float | None = None  # it was refused, not broken; seconds until to try again


@dataclass(slots=True)
class ProcessedOutputs:
    """What a step brought, by the request's id as the user's side knows it.

    `stopped_ids` are the engine's ids of requests that ended here, by a stop string: the engine
    must be told, for it would go on.
    """

    items: list[tuple[str, CompletionDelta | FailedSample]] = field(default_factory=list)
    stopped_ids: list[str] = field(default_factory=list)


class OutputProcessor:
    """Follows all requests of an engine from token ids to text.

    Args:
        tokenizer: the model's.
        clock: the engine's clock, for the end of requests that stop strings end.
    """

    def __init__(self, tokenizer: Tokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._samples: dict[str, _Sample] = {}

    def add(self, request_id: str, requests: Sequence[Request]) -> None:
        """Follow the samples of the user's request `request_id` from now on."""
        for request in requests:
            self._samples[request.request_id] = _Sample(request_id, request, self._tokenizer)

    def remove(self, requests: Iterable[Request]) -> list[str]:
        """Forget requests; returns the ids of those that hadn't ended, for the engine to abort."""
        return [
            request.request_id
            for request in requests
            if self._samples.pop(request.request_id, None) is not None
        ]

    def process(self, outputs: Iterable[RequestOutput]) -> ProcessedOutputs:
        """Turn a step's outputs into deltas; those of forgotten requests are dropped."""
        processed = ProcessedOutputs()
        for output in outputs:
            sample = self._samples.get(output.request_id)
            if sample is None:
                continue
            item = sample.advance(output, self._clock)
            if item is None:
                continue
            processed.items.append((sample.parent_id, item))
            if isinstance(item, FailedSample) or item.finish_reason is not None:
                del self._samples[output.request_id]
                if output.finish_reason is None:
                    processed.stopped_ids.append(output.request_id)
        return processed


class _Sample:
    """One completion on its way."""

    def __init__(self, parent_id: str, request: Request, tokenizer: Tokenizer) -> None:
        self.parent_id = parent_id
        self._index = request.sample_index
        self._params = request.sampling_params
        self._text = TextStream(tokenizer, self._params)
        self._num_tokens = 0
        self._prompt_logprobs: list[TokenLogprob] = []
        self._times = RequestTimes(arrival=request.arrival_time)

    def advance(
        self, output: RequestOutput, clock: Callable[[], float]
    ) -> CompletionDelta | FailedSample | None:
        """What the output means for the user; None when there is nothing to show yet."""
        if output.error is not None:
            return FailedSample(self._index, output.error, output.retry_after)
        self._prompt_logprobs += output.prompt_logprobs
        if output.times is not None:
            self._times = output.times
        if not output.new_token_ids and output.finish_reason is None:
            return None

        delta = CompletionDelta(
            index=self._index,
            finish_reason=output.finish_reason,
            # Later samples find the blocks of the first, which is no saving to the user.
            num_cached_tokens=output.num_cached_tokens if self._index == 0 else 0,
        )
        if self._num_tokens == 0 and self._params.prompt_logprobs is not None:
            delta.prompt_logprobs = self._prompt_logprobs
        self._take_tokens(output, delta)
        if output.times is not None or delta.finish_reason is not None:
            delta.metrics = self._metrics(output, clock)
        return delta

    def _take_tokens(self, output: RequestOutput, delta: CompletionDelta) -> None:
        """Take in the new tokens up to one that completes a stop string; drop those after it."""
        num_taken = 0
        for token_id in output.new_token_ids:
            num_taken += 1
            is_stop_token = num_taken == len(output.new_token_ids) and (
                output.stop_token_id is not None
            )
            if is_stop_token and not self._params.include_stop_str_in_output:
                break
            delta.text += self._text.push(token_id)
            if self._text.matched_stop is not None:
                break
        self._num_tokens += num_taken
        delta.token_ids = output.new_token_ids[:num_taken]
        if self._params.logprobs is not None:
            delta.logprobs = list(output.new_logprobs[:num_taken])
        self._settle_end(output, delta)

    def _settle_end(self, output: RequestOutput, delta: CompletionDelta) -> None:
        """Decide why the answer ends, if it does: a stop string comes before any other reason."""
        if self._text.matched_stop is None and delta.finish_reason is not None:
            delta.text += self._text.end()
        if self._text.matched_stop is not None:
            delta.finish_reason = FinishReason.STOP
            delta.stop_reason = self._text.matched_stop
        elif output.stop_token_id in self._params.stop_token_ids:
            delta.stop_reason = output.stop_token_id
        else:
            delta.stop_reason = output.stop_reason

    def _metrics(self, output: RequestOutput, clock: Callable[[], float]) -> RequestMetrics:
        times = self._times
        # The engine doesn't know of an end by a stop string; it is now.
        finished = clock() if times.finished is None else times.finished
        return RequestMetrics(
            queue_time=_span(times.arrival, times.first_scheduled),
            prefill_time=_span(times.first_scheduled, times.first_token),
            decode_time=_span(times.first_token, finished),
            ttft=_span(times.arrival, times.first_token),
            e2e_time=finished - times.arrival,
            num_preemptions=output.num_preemptions,
        )


def _span(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
