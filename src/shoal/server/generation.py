"""Runs the prompts of one user's request on the engine and counts what comes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import msgspec

from shoal.engine.outputs import CompletionDelta, RequestMetrics
from shoal.model.tokenizer import Tokenizer
from shoal.request import (
    FinishReason,
    InvalidParameterError,
    RequestOptions,
    SamplingParams,
)
from shoal.scheduler.interface import QueueFullError, RequestRejectedError
from shoal.server.record import RequestRecord
from shoal.server.responses import PromptTokensDetails, Usage
from shoal.server.state import ServerState

REFUSALS = (InvalidParameterError, RequestRejectedError, QueueFullError)


@dataclass(slots=True)
class _Progress:
    """Where one choice stands: its tokens and the times of the first and the newest.

    `metrics` are the engine's, of when the first token came.
    """

    num_tokens: int = 0
    first_token_time: float | None = None
    last_token_time: float = 0.0
    metrics: RequestMetrics | None = None
    finished: bool = False

    def metrics_at(self, now: float) -> RequestMetrics | None:
        """Where the time of a choice went that is cut off now; None before its first token."""
        if self.metrics is None or self.first_token_time is None:
            return None
        since = now - self.first_token_time
        return replace(self.metrics, decode_time=since, e2e_time=self.metrics.e2e_time + since)


@dataclass(slots=True)
class Generation:
    """One user's request: `prompts` with `params.n` samples each.

    Choice `i` of the answer is sample `i % n` of prompt `i // n`.
    """

    state: ServerState
    record: RequestRecord
    prompts: list[list[int]]
    params: SamplingParams
    options: RequestOptions
    _progress: list[_Progress] = field(init=False)
    _cached_tokens: dict[int, int] = field(default_factory=dict)  # by prompt
    _answered_prompts: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._progress = [_Progress() for _ in range(self.num_choices)]
        self.record.num_choices = self.num_choices
        self.record.prompt_tokens = sum(map(len, self.prompts))

    @property
    def num_choices(self) -> int:
        """Choices of the answer."""
        return len(self.prompts) * self.params.n

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.state.engine.tokenizer

    async def deltas(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        """Yield `(choice index, delta)` as the engine brings them.

        A delta counts when the next is asked for: it has been written to the client then, if the
        answer is streamed. Closing the generator aborts what still runs.

        Raises:
            InvalidParameterError, RequestRejectedError, QueueFullError: before the first yield of
                the prompt concerned.
            RequestFailedError, EngineDeadError: the engine could not go on.
        """
        num_samples = self.params.n
        reason: FinishReason | None = FinishReason.ERROR
        try:
            async with aclosing(self._merged()) as merged:
                async for prompt_index, delta in merged:
                    choice_index = prompt_index * num_samples + delta.index
                    try:
                        yield choice_index, delta
                    finally:  # it was generated, even if the client has gone away
                        self._count(prompt_index, choice_index, delta)
        except (GeneratorExit, asyncio.CancelledError):
            reason = FinishReason.ABORT
            raise
        except REFUSALS:
            reason = None
            raise
        finally:
            self._close(reason)

    def usage(self) -> Usage:
        """The tokens so far."""
        prompt_tokens = self.record.prompt_tokens
        completion_tokens = self.record.completion_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(self.record.cached_tokens),
        )

    def _merged(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        options = msgspec.structs.replace(
            self.options, client_request_id=self.record.client_request_id
        )
        streams = [
            self.state.engine.generate(
                f"{self.record.request_id}-{index}", token_ids, self.params, options
            )
            for index, token_ids in enumerate(self.prompts)
        ]
        merged = _one(streams[0]) if len(streams) == 1 else _merge(streams)
        if self.params.prompt_logprobs is None or self.params.n == 1:
            return merged
        return _first_sample_first(merged)

    def _count(self, prompt_index: int, choice_index: int, delta: CompletionDelta) -> None:
        progress = self._progress[choice_index]
        if delta.num_cached_tokens:
            self._note_cached(prompt_index, delta.num_cached_tokens)
        if delta.token_ids:
            self._count_tokens(prompt_index, progress, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finish(progress, delta.finish_reason)
            if delta.metrics is not None:
                self.record.choices.append(delta.metrics)
                self.state.metrics.ended_in_engine(delta.metrics)
        elif delta.metrics is not None:
            progress.metrics = delta.metrics

    def _note_cached(self, prompt_index: int, num_tokens: int) -> None:
        """Said with the first token and again at the end, it counts once."""
        self._cached_tokens[prompt_index] = num_tokens
        self.record.cached_tokens = sum(self._cached_tokens.values())

    def _count_tokens(self, prompt_index: int, progress: _Progress, num_tokens: int) -> None:
        now = time.monotonic()
        self.record.completion_tokens += num_tokens
        if progress.first_token_time is None:
            progress.first_token_time = now
            self.record.first_token(now)
            self.state.metrics.first_tokens(now - self.record.start, num_tokens)
            if prompt_index not in self._answered_prompts:
                self._answered_prompts.add(prompt_index)
                self.state.metrics.prompt_answered(len(self.prompts[prompt_index]))
        else:
            self.state.metrics.next_tokens(now - progress.last_token_time, num_tokens)
        progress.num_tokens += num_tokens
        progress.last_token_time = now

    def _finish(self, progress: _Progress, reason: FinishReason) -> None:
        progress.finished = True
        self.record.finish_reasons.append(str(reason))
        tail = None
        if progress.first_token_time is not None and progress.num_tokens > 1:
            tail = (progress.last_token_time - progress.first_token_time) / (
                progress.num_tokens - 1
            )
        self.state.metrics.finished(reason, time.monotonic() - self.record.start, tail)

    def _close(self, reason: FinishReason | None) -> None:
        """Count the choices that did not come to their end.

        A refused request (None) is counted as such; of its choices only those count that had
        begun, as they may when another of its prompts is refused.
        """
        now = time.monotonic()
        for progress in self._progress:
            if progress.finished:
                continue
            if (metrics := progress.metrics_at(now)) is not None:
                self.record.choices.append(metrics)
            if reason is not None:
                self._finish(progress, reason)
            elif progress.num_tokens > 0:
                self._finish(progress, FinishReason.ABORT)


async def _one(
    stream: AsyncIterator[CompletionDelta],
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """The deltas of a single prompt."""
    try:
        async for delta in stream:
            yield 0, delta
    finally:
        await _aclose(stream)


async def _first_sample_first(
    merged: AsyncGenerator[tuple[int, CompletionDelta], None],
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Hold a prompt's other samples back until its first has begun.

    Only the first brings the prompt's log-probabilities, with its first delta.
    """
    begun: set[int] = set()
    held: dict[int, list[CompletionDelta]] = {}
    async with aclosing(merged):
        async for prompt_index, delta in merged:
            if prompt_index in begun:
                yield prompt_index, delta
            elif delta.index > 0:
                held.setdefault(prompt_index, []).append(delta)
            else:
                begun.add(prompt_index)
                yield prompt_index, delta
                for late in held.pop(prompt_index, ()):
                    yield prompt_index, late


async def _merge(
    streams: list[AsyncIterator[CompletionDelta]],
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """The deltas of several prompts as they come; the first error ends them all."""
    queue: asyncio.Queue[tuple[int, CompletionDelta] | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[CompletionDelta]) -> None:
        try:
            async for delta in stream:
                queue.put_nowait((index, delta))
        except Exception as error:
            queue.put_nowait(error)  # raised where the queue is read
        else:
            queue.put_nowait(None)
        finally:
            await _aclose(stream)

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _aclose(stream: AsyncIterator[CompletionDelta]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
