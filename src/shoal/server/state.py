"""What the server's parts share: the engine, the phase of its life, the requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from shoal.config import EngineConfig
from shoal.engine.inputs import DEFAULT_OPTIONS
from shoal.engine.messages import EngineInfo
from shoal.engine.outputs import CompletionDelta
from shoal.model.chat import ChatTemplate
from shoal.model.tokenizer import Tokenizer
from shoal.request import RequestOptions, SamplingParams
from shoal.scheduler.interface import BatchView, SchedulerStats
from shoal.server.errors import ApiError, unavailable
from shoal.server.metrics import Metrics
from shoal.server.record import RequestRecord


class Engine(Protocol):
    """What the server asks of an engine (`shoal.engine.client.AsyncEngine`)."""

    @property
    def config(self) -> EngineConfig:
        """The settings that the engine was made with."""

    @property
    def info(self) -> EngineInfo:
        """The loaded model and its limits."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template."""

    @property
    def is_alive(self) -> bool:
        """Whether the engine can still serve."""

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded."""

    def watch_stats(self, observer: Callable[[SchedulerStats], None]) -> None:
        """Call `observer` with the scheduler's newest snapshot and with all to come."""

    def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncIterator[CompletionDelta]:
        """Generate; closing the iterator aborts the request."""

    async def reset_prefix_cache(self) -> int:
        """Forget all cached KV blocks; returns how many."""

    async def view_batch(self) -> BatchView:
        """Who runs, and the first of those who wait."""


@dataclass(slots=True)
class ServerState:
    """The state of one server process; owned by its event loop."""

    engine: Engine
    model_names: Sequence[str]
    api_key: str | None = None
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    metrics: Metrics = field(default_factory=Metrics)
    _stopped: bool = False
    _in_flight: dict[str, RequestRecord] = field(default_factory=dict)  # by request_id
    _work: set[asyncio.Future[Any]] = field(default_factory=set)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.engine.watch_stats(self.metrics.steps.observe)
        self.engine.watch_stats(self.metrics.recent_steps.observe)
        self._idle.set()

    def require_ready(self) -> None:
        """Refuse a request that can't be served now.

        Raises:
            ApiError: 503; the code says whether the server loads, shuts down or has failed.
        """
        if self.draining:
            raise unavailable("The server is shutting down.", "shutting_down")
        if not self.engine.is_alive:
            raise ApiError(
                503,
                "The engine has died; restart the server.",
                code="engine_dead",
                refusal="unavailable",
            )
        if not self.engine.is_ready:
            raise unavailable("The model is still loading.", "model_loading")

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with; a request that names no model gets the served one.

        Raises:
            ApiError: 404 naming the served models.
        """
        if name is None:
            return self.model_names[0]
        if name in self.model_names:
            return name
        served = ", ".join(f"'{served}'" for served in self.model_names)
        raise ApiError(
            404,
            f"The model '{name[:100]}' does not exist; this server has {served}.",
            param="model",
            code="model_not_found",
            refusal="invalid",
        )

    @contextmanager
    def in_flight(self, record: RequestRecord) -> Iterator[None]:
        """Count a request as in flight for the block."""
        self._in_flight[record.request_id] = record
        self._idle.clear()
        try:
            yield
        finally:
            del self._in_flight[record.request_id]
            if not self._in_flight:
                self._idle.set()

    def record_of(self, request_id: str) -> RequestRecord | None:
        """The record of a request in flight, by the id that the server gave it."""
        return self._in_flight.get(request_id)

    async def wait_until_idle(self) -> None:
        """Return when no request is in flight."""
        await self._idle.wait()

    @contextmanager
    def stoppable(self, work: asyncio.Future[Any]) -> Iterator[None]:
        """Let `stop_now` cancel `work` during the block."""
        self._work.add(work)
        if self._stopped:
            work.cancel()
        try:
            yield
        finally:
            self._work.discard(work)

    def stop_now(self) -> None:
        """Cancel every request in flight; its client is told that the server stops."""
        self.draining = self._stopped = True
        for work in self._work:
            work.cancel()
