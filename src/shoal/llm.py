"""The offline front door: a model in this process, many prompts at once."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import Progress

from shoal.config import EngineConfig
from shoal.engine.inputs import DEFAULT_OPTIONS, InputProcessor
from shoal.engine.loading import load_engine, load_text_interface, model_limits
from shoal.engine.messages import EngineInfo
from shoal.engine.outputs import CompletionDelta, FailedSample, OutputProcessor, RequestMetrics
from shoal.model.chat import ChatTemplateError
from shoal.model.loader import open_model
from shoal.model.registry import resolve
from shoal.model.tokenizer import InvalidTextError, Tokenizer
from shoal.request import (
    FinishReason,
    InvalidParameterError,
    Request,
    RequestOptions,
    SamplingParams,
    TokenLogprob,
)
from shoal.scheduler.interface import (
    QueueFullError,
    RequestOutput,
    RequestRejectedError,
    SchedulerStats,
)

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
T = TypeVar("T", SamplingParams, RequestOptions)

_DEFAULTS = EngineConfig()

_ROW_ERRORS = (
    ChatTemplateError,
    InvalidParameterError,
    InvalidTextError,
    QueueFullError,
    RequestRejectedError,
)


@dataclass(slots=True)
class Completion:
    """One of the `n` answers to a prompt; `CompletionDelta` says what the parts mean."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics | None = None

    def append(self, delta: CompletionDelta) -> None:
        """Take in what is new."""
        self.token_ids += delta.token_ids
        self.text += delta.text
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.metrics = delta.metrics


@dataclass(slots=True)
class GenerationOutput:
    """The answers to one prompt. The attributes of the first are those of the whole.

    A prompt that can't be served has `error` set and finish_reason "error"; the others go on.
    """

    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprob] | None = None  # of the second token onwards
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """Token ids of the first completion."""
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Logprobs of the first completion, when asked for."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first completion ended."""
        return self.completions[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or stop token id that ended the first completion."""
        return self.completions[0].stop_reason

    @property
    def metrics(self) -> RequestMetrics | None:
        """Times of the first completion."""
        return self.completions[0].metrics

    def append(self, delta: CompletionDelta) -> None:
        """Take in what is new in one completion."""
        self.completions[delta.index].append(delta)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)

    def fail(self, error: str) -> None:
        """End all completions with an error."""
        self.error = error
        for completion in self.completions:
            completion.finish_reason = FinishReason.ERROR


@dataclass(slots=True)
class _Row:
    """A prompt on its way: its requests once it has been accepted, its answer as it grows."""

    request_id: str
    output: GenerationOutput
    requests: list[Request]


class LLM:
    """Generates for many prompts at once, in this process.

    Args:
        model: an alias, a path to a .gguf file, or hf:owner/name:file.
        settings: fields of `EngineConfig`.

    Raises:
        ConfigError: a setting is outside its range or contradicts the model.
        ModelError: the model can't be found, fetched or read.
    """

    def __init__(self, model: str = _DEFAULTS.model, **settings: Any) -> None:
        config = EngineConfig(model=model, **settings)
        file = open_model(resolve(model))
        self._text = load_text_interface(file)
        self._engine, self._info = load_engine(config, file)
        self._inputs = InputProcessor(model_limits(self._info, self._text), config)
        self._outputs = OutputProcessor(self._text.tokenizer)
        self._request_ids = map(str, itertools.count())

    @property
    def info(self) -> EngineInfo:
        """What is loaded, and its limits."""
        return self._info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._text.tokenizer

    @property
    def stats(self) -> SchedulerStats:
        """A snapshot of the scheduler."""
        return self._engine.stats()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] = DEFAULT_OPTIONS,
        progress: bool = False,
    ) -> list[GenerationOutput]:
        """Continue each prompt; the outputs are in the order of the prompts.

        Args:
            prompts: strings or lists of token ids, mixed at will; a single string is one prompt.
            sampling_params: for all prompts, or one for each; the defaults when not given.
            options: how the engine treats the prompts, for all or one for each.
            progress: show a progress bar on standard error.

        Raises:
            ValueError: there are not as many sampling_params, or options, as prompts.
            EngineDeadError: the engine can't go on.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        rows = self._make_rows(prompts, self._read_prompt, sampling_params, options)
        return self._run(rows, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] = DEFAULT_OPTIONS,
        progress: bool = False,
    ) -> list[GenerationOutput]:
        """Answer each conversation: a list of messages with role and content, or several such.

        The arguments are otherwise those of `generate`; a model without a chat template gives an
        error for each.
        """
        is_single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        prompts = [conversations] if is_single else conversations
        rows = self._make_rows(prompts, self._read_conversation, sampling_params, options)
        return self._run(rows, progress)

    def reset_prefix_cache(self) -> int:
        """Forget all cached KV blocks; returns how many."""
        return self._engine.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and release its memory."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # Prompts

    def _read_prompt(self, prompt: Any) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Sequence) and all(type(token_id) is int for token_id in prompt):
            return None, list(prompt)
        raise InvalidParameterError(
            "prompt", f"a prompt must be a string or a list of token ids, got {prompt!r:.80}"
        )

    def _read_conversation(self, messages: Any) -> tuple[str | None, list[int]]:
        if self._text.chat_template is None:
            raise InvalidParameterError("messages", "the model has no chat template")
        prompt = self._text.chat_template.render(messages)
        return prompt, self.tokenizer.encode(prompt, add_special_tokens=False)

    # Running

    def _run(self, rows: list[_Row], progress: bool) -> list[GenerationOutput]:
        with Progress(console=Console(stderr=True), disable=not progress) as bar:
            task = bar.add_task("Generating", total=len(rows))
            try:
                for num_left in self._drive(rows):
                    bar.update(task, completed=len(rows) - num_left)
            finally:
                self._forget(rows)
        return [row.output for row in rows]

    def _make_rows(
        self,
        prompts: Sequence[Any],
        read: Callable[[Any], tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: RequestOptions | Sequence[RequestOptions],
    ) -> list[_Row]:
        questions = zip(
            prompts,
            _one_for_each(prompts, sampling_params or SamplingParams(), "sampling_params"),
            _one_for_each(prompts, options, "options"),
            strict=True,
        )
        arrival_time = time.monotonic()
        return [self._make_row(read, *question, arrival_time) for question in questions]

    def _make_row(
        self,
        read: Callable[[Any], tuple[str | None, list[int]]],
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions,
        arrival_time: float,
    ) -> _Row:
        completions = [Completion() for _ in range(params.n)]
        row = _Row(next(self._request_ids), GenerationOutput(None, [], completions), requests=[])
        try:
            row.output.prompt, row.output.prompt_token_ids = read(prompt)
            row.requests = self._inputs.process(
                row.request_id,
                row.output.prompt_token_ids,
                params,
                options,
                arrival_time=arrival_time,
            )
        except _ROW_ERRORS as error:
            row.output.fail(str(error))
        return row

    def _drive(self, rows: list[_Row]) -> Iterable[int]:
        """Run the engine until all rows have ended; yields after each step how many have not."""
        waiting = deque(row for row in rows if row.output.error is None)
        running: dict[str, _Row] = {}
        while waiting or running:
            self._feed(waiting, running)
            self._engine.end_input()  # what still waits here comes when others have ended
            self._take(self._engine.step(), running)
            yield len(waiting) + len(running)

    def _feed(self, waiting: deque[_Row], running: dict[str, _Row]) -> None:
        """Hand rows to the engine as far as its queue has room."""
        while waiting:
            row = waiting[0]
            try:
                self._engine.add(row.requests)
            except QueueFullError as error:
                if running:  # room will come
                    return
                row.output.fail(str(error))
            except RequestRejectedError as error:
                row.output.fail(str(error))
            else:
                self._outputs.add(row.request_id, row.requests)
                running[row.request_id] = row
            waiting.popleft()

    def _take(self, outputs: list[RequestOutput], running: dict[str, _Row]) -> None:
        processed = self._outputs.process(outputs)
        self._engine.abort(processed.stopped_ids, FinishReason.STOP)
        for request_id, item in processed.items:
            row = running.get(request_id)
            if row is None:  # another sample of it has failed
                continue
            if isinstance(item, FailedSample):
                row.output.fail(item.error)
                self._forget([row])
            else:
                row.output.append(item)
            if all(completion.finish_reason for completion in row.output.completions):
                del running[request_id]

    def _forget(self, rows: Iterable[_Row]) -> None:
        """End what still runs, after a failure or an interruption."""
        for row in rows:
            self._engine.abort(self._outputs.remove(row.requests))


def _one_for_each(prompts: Sequence[Any], values: T | Sequence[T], name: str) -> Sequence[T]:
    if not isinstance(values, Sequence):
        return [values] * len(prompts)
    if len(values) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts, but {len(values)} {name}")
    return values
