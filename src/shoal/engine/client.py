"""The engine as the server sees it: asynchronous, in another process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shoal.config import EngineConfig
from shoal.engine.connection import EngineConnection
from shoal.engine.errors import (
    EngineDeadError,
    EngineStartError,
    RequestFailedError,
    describe,
    one_line,
)
from shoal.engine.inputs import DEFAULT_OPTIONS, InputProcessor
from shoal.engine.loading import TextInterface, load_text_interface, model_limits, model_name
from shoal.engine.messages import (
    AbortRequests,
    AddRequests,
    Advanced,
    Died,
    EndInput,
    EngineInfo,
    Event,
    Refused,
    ResetPrefixCache,
    Started,
    ViewBatch,
)
from shoal.engine.outputs import CompletionDelta, FailedSample, OutputProcessor
from shoal.model.registry import resolve
from shoal.request import FinishReason, InvalidParameterError, RequestOptions, SamplingParams
from shoal.scheduler.interface import (
    BatchView,
    QueueFullError,
    RequestRejectedError,
    SchedulerStats,
    TimeLimitError,
)

if TYPE_CHECKING:
    from shoal.model.chat import ChatTemplate
    from shoal.model.tokenizer import Tokenizer

__all__ = ["AsyncEngine", "EngineInfo"]

StatsObserver = Callable[[SchedulerStats], None]

MAX_WAITING_VIEWED = 20
"""Requests of the queue that a view of the batch tells of."""

_logger = logging.getLogger(__name__)


class _Stream:
    """What has come for a request and its one reader; costs half of an `asyncio.Queue`."""

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: deque[CompletionDelta | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: CompletionDelta | Exception) -> None:
        """Hand an item to the reader."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> CompletionDelta | Exception:
        """The oldest item; waits for one."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._items.popleft()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What there is once the engine has started."""

    connection: EngineConnection
    info: EngineInfo
    text: TextInterface
    inputs: InputProcessor
    outputs: OutputProcessor


class AsyncEngine:
    """An engine in its own process; to be used from one event loop.

    One message a step brings the tokens of all requests, and one task takes it apart.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loaded: _Loaded | None = None
        self._reader: asyncio.Task[None] | None = None
        self._streams: dict[str, _Stream] = {}
        self._resets: deque[asyncio.Future[int]] = deque()
        self._view: asyncio.Future[BatchView] | None = None  # asked for, all who wait share it
        self._stats: SchedulerStats | None = None
        self._stats_observers: list[StatsObserver] = []
        self._death: str | None = None  # why nothing can be served any more

    async def start(self) -> None:
        """Start the process; returns when the model is loaded.

        Raises:
            EngineStartError: it can't be loaded; the message is one line.
        """
        try:
            self._loaded = await self._load()
        except Exception as error:
            self._death = "the engine could not start"
            if isinstance(error, EngineStartError):
                raise
            raise EngineStartError(one_line(error) or describe(error)) from error
        self._reader = asyncio.create_task(self._read_events())

    async def close(self) -> None:
        """End the process; streams that still run get `EngineDeadError`."""
        self._die("the engine was closed")
        if self._loaded is None or self._reader is None:
            return
        self._reader.cancel()
        await asyncio.wait({self._reader})
        await self._loaded.connection.close()
        self._reader = None

    @property
    def config(self) -> EngineConfig:
        """The settings that the engine was made with."""
        return self._config

    @property
    def is_alive(self) -> bool:
        """Whether the engine serves, or will once it has started."""
        return self._death is None

    @property
    def is_ready(self) -> bool:
        """Whether the engine serves now."""
        return self._loaded is not None and self._death is None

    @property
    def info(self) -> EngineInfo:
        """What is loaded; there is none before `start` has returned."""
        return self._require_loaded().info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; there is none before `start` has returned."""
        return self._require_loaded().text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one."""
        return self._require_loaded().text.chat_template

    @property
    def stats(self) -> SchedulerStats | None:
        """The newest snapshot of the scheduler; None before `start` has returned and at the end."""
        return self._stats if self.is_ready else None

    def watch_stats(self, observer: StatsObserver) -> None:
        """Call `observer` with the newest snapshot, if there is one, and with all to come.

        A snapshot comes after every step, so the difference of two counters is what a step did.
        """
        self._stats_observers.append(observer)
        if self._stats is not None:
            observer(self._stats)

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncGenerator[CompletionDelta, None]:
        """Yield what is new in the `params.n` completions, interleaved, until all have finished.

        Closing or cancelling the generator ends the request in the engine within a step.

        Raises:
            InvalidParameterError, RequestRejectedError, QueueFullError, TimeLimitError: before the
                first delta.
            RequestFailedError: the engine failed to compute the request.
            EngineDeadError: the engine has stopped.
        """
        loaded = self._require_loaded()
        if self._death is not None:
            raise EngineDeadError(self._death)
        if request_id in self._streams:
            raise InvalidParameterError("request_id", f"request_id {request_id!r} is in use")
        requests = loaded.inputs.process(
            request_id,
            prompt_token_ids,
            params,
            options,
            arrival_time=time.monotonic(),
        )
        stream = self._streams[request_id] = _Stream()
        loaded.outputs.add(request_id, requests)
        loaded.connection.send(AddRequests(request_id, requests))
        num_unfinished = len(requests)
        try:
            while num_unfinished > 0:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                num_unfinished -= item.finish_reason is not None
                yield item
        finally:
            del self._streams[request_id]
            self._abort(loaded, loaded.outputs.remove(requests), FinishReason.ABORT)

    def end_input(self) -> None:
        """Tell the engine that no request comes any more: a batch need not wait to fill."""
        if self._loaded is not None and self._death is None:
            self._loaded.connection.send(EndInput())

    async def reset_prefix_cache(self) -> int:
        """Forget all cached KV blocks; returns how many. Running requests keep theirs.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        loaded = self._require_loaded()
        if self._death is not None:
            raise EngineDeadError(self._death)
        reset: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._resets.append(reset)
        loaded.connection.send(ResetPrefixCache())
        return await reset

    async def view_batch(self) -> BatchView:
        """Who runs, and the first of those who wait, after the engine's present step.

        The engine tells it only when asked, and those who ask at the same time share an answer.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        loaded = self._require_loaded()
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._view is None:
            self._view = asyncio.get_running_loop().create_future()
            loaded.connection.send(ViewBatch(MAX_WAITING_VIEWED))
        return await asyncio.shield(self._view)

    async def _load(self) -> _Loaded:
        path = await asyncio.to_thread(resolve, self._config.model)
        connection = EngineConnection(replace(self._config, model=str(path)))
        try:
            # Both processes read the file at the same time.
            text = await asyncio.to_thread(_read_text_interface, path)
            started = await connection.receive()
            if not isinstance(started, Started):
                message = getattr(started, "message", f"unexpected {type(started).__name__}")
                raise EngineStartError(message)
        except BaseException:
            await connection.close()
            raise
        self._take_stats(started.stats)
        info = msgspec.structs.replace(started.info, model=model_name(self._config.model))
        return _Loaded(
            connection=connection,
            info=info,
            text=text,
            inputs=InputProcessor(model_limits(info, text), self._config),
            outputs=OutputProcessor(text.tokenizer),
        )

    async def _read_events(self) -> None:
        loaded = self._require_loaded()
        try:
            while True:
                self._handle(loaded, await loaded.connection.receive())
        except EngineDeadError as error:
            _logger.critical("the engine has stopped: %s", error)
            self._die(str(error))
        except Exception as error:
            _logger.critical("the engine's events can't be read", exc_info=error)
            self._die(f"the engine's events can't be read: {error}")

    def _handle(self, loaded: _Loaded, event: Event) -> None:
        if isinstance(event, Died):
            raise EngineDeadError(event.message)
        if not isinstance(event, Advanced):
            raise EngineDeadError(f"the engine sent {type(event).__name__} while serving")
        self._take_stats(event.stats)
        for num_blocks in event.num_blocks_reset:
            if not (reset := self._resets.popleft()).done():
                reset.set_result(num_blocks)
        if event.batch is not None and self._view is not None:
            self._view.set_result(event.batch)
            self._view = None
        for refused in event.refused:
            self._put(refused.request_id, _refusal(refused))
        processed = loaded.outputs.process(event.outputs)
        for request_id, item in processed.items:
            if isinstance(item, FailedSample):
                self._put(request_id, _failure(item))
            else:
                self._put(request_id, item)
        self._abort(loaded, processed.stopped_ids, FinishReason.STOP)

    def _take_stats(self, stats: SchedulerStats) -> None:
        self._stats = stats
        for observer in self._stats_observers:
            observer(stats)

    def _put(self, request_id: str, item: CompletionDelta | Exception) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:  # else its reader has gone away
            stream.put(item)

    def _abort(self, loaded: _Loaded, engine_request_ids: list[str], reason: FinishReason) -> None:
        if engine_request_ids and self._death is None:
            loaded.connection.send(AbortRequests(engine_request_ids, reason))

    def _die(self, reason: str) -> None:
        """Let nothing new in and end all streams; only the first reason counts."""
        if self._death is None:
            self._death = reason
            for stream in self._streams.values():
                stream.put(EngineDeadError(reason))
            for reset in self._resets:
                if not reset.done():
                    reset.set_exception(EngineDeadError(reason))
            if self._view is not None:
                self._view.set_exception(EngineDeadError(reason))
                self._view = None

    def _require_loaded(self) -> _Loaded:
        if self._loaded is None:
            raise EngineDeadError(self._death or "the engine has not started")
        return self._loaded


def _read_text_interface(path: Path) -> TextInterface:
    # Imported while the engine's process starts, not before.
    from shoal.model.loader import open_model  # noqa: PLC0415 - slow

    return load_text_interface(open_model(path))


def _failure(sample: FailedSample) -> Exception:
    if sample.retry_after is None:
        return RequestFailedError(sample.error)
    return TimeLimitError(sample.error, sample.retry_after)


def _refusal(refused: Refused) -> Exception:
    if refused.retry_after is None:
        return RequestRejectedError(refused.message)
    return QueueFullError(refused.message, refused.retry_after)
