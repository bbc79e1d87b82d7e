"""GET / and /dashboard/...: a page that shows what the server does now, and its data."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.config import EngineConfig
from shoal.scheduler.interface import BatchView, RequestProgress, SchedulerStats
from shoal.server.connection import run_while_connected
from shoal.server.recent import Percentiles, Throughput
from shoal.server.state import ServerState

STATE_PATH = "/dashboard/state"
_MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_SCRIPTS = ("dashboard.js", "charts.js", "key.js", "prompt.js", "tables.js")
_FILES = {"/": "dashboard.html"} | {
    f"/dashboard/{name}": name for name in ("dashboard.css", "icon.svg", *_SCRIPTS)
}
PAGE_PATHS = frozenset(_FILES)
"""What loads without a key: the page without any data."""

_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
_NO_KEY = b'data-api-key="none"'
_KEY = b'data-api-key="required"'

Phase = Literal["waiting", "prefill", "decode", "padding"]


class Row(msgspec.Struct, frozen=True):
    """A sequence that runs or waits."""

    request_id: str  # the client's
    sample: str  # "prompt/sample", from 0, of a request with several choices; else ""
    phase: Phase
    age: float  # seconds since its arrival
    priority: int
    num_prompt_tokens: int
    num_prompt_tokens_computed: int
    num_output_tokens: int
    num_preemptions: int


class Blocks(msgspec.Struct, frozen=True):
    """KV blocks, by what they are doing."""

    used: int
    cached: int
    free: int


class DashboardState(msgspec.Struct, frozen=True):
    """All that the page shows."""

    model: str
    chat: bool  # whether the model answers chats
    settings: dict[str, str | int | float]
    running: list[Row]
    waiting: list[Row]  # the first ones
    num_waiting: int
    blocks: Blocks
    throughput: Throughput
    slot_utilization: float | None
    ttft: Percentiles | None
    tpot: Percentiles | None
    finished: dict[str, int]  # by finish reason
    refused: dict[str, int]  # by the reason
    num_preemptions: int


def page_handlers() -> Iterable[tuple[str, Callable[[Request], Awaitable[Response]]]]:
    """The page's files by their paths."""
    directory = files("shoal.server") / "static"
    for path, name in _FILES.items():
        media_type = _MEDIA_TYPES[name.rpartition(".")[2]]
        yield path, _file_handler((directory / name).read_bytes(), media_type)


def _file_handler(content: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def serve_file(request: Request) -> Response:
        """The file; the page is told whether it has to ask for a key."""
        state: ServerState = request.app.state.server
        body = content if state.api_key is None else content.replace(_NO_KEY, _KEY)
        return Response(body, media_type=media_type, headers=_HEADERS)

    return serve_file


async def dashboard_state(request: Request) -> Response:
    """What the page shows; only this question makes the engine tell of its batch."""
    state: ServerState = request.app.state.server
    state.require_ready()
    batch = await run_while_connected(state, request.receive, state.engine.view_batch())
    body = msgspec.json.encode(_describe(state, batch))
    headers = {"cache-control": "no-store"}
    return Response(body, media_type="application/json", headers=headers)


def _describe(state: ServerState, batch: BatchView) -> DashboardState:
    metrics = state.metrics
    stats = metrics.recent_steps.stats
    now = time.monotonic()
    return DashboardState(
        model=state.model_names[0],
        chat=state.engine.chat_template is not None,
        settings=_settings(state.engine.config, state.engine.info.max_model_len),
        running=[_row(state, progress, _phase(progress), now) for progress in batch.running],
        waiting=[_row(state, progress, "waiting", now) for progress in batch.waiting],
        num_waiting=max(stats.num_requests_waiting, len(batch.waiting)),
        blocks=_blocks(stats),
        throughput=metrics.recent_steps.throughput(),
        slot_utilization=metrics.recent_steps.slot_utilization(),
        ttft=metrics.recent_ttft.percentiles(),
        tpot=metrics.recent_tpot.percentiles(),
        finished=metrics.finished_by_reason(),
        refused=metrics.refused_by_reason(),
        num_preemptions=stats.num_preemptions,
    )


def _settings(config: EngineConfig, max_model_len: int) -> dict[str, str | int | float]:
    """The strategy and its limits, by the names of their flags."""
    settings: dict[str, str | int | float] = {
        "scheduler": config.scheduler,
        "max_num_seqs": config.max_num_seqs,
        "max_model_len": max_model_len,
        "max_waiting_requests": config.max_waiting_requests,
    }
    if config.scheduler != "static":
        settings["max_num_batched_tokens"] = config.token_budget
    if config.scheduler != "continuous":
        settings["max_queue_delay"] = config.for_serving().queue_delay
    return settings


def _row(state: ServerState, progress: RequestProgress, phase: Phase, now: float) -> Row:
    request_id, _, sample = progress.request_id.rpartition("-")
    record = state.record_of(request_id)  # none, if its client has just gone
    return Row(
        request_id=request_id if record is None else record.client_request_id,
        sample="" if record is not None and record.num_choices == 1 else sample,
        phase=phase,
        age=max(0.0, now - progress.arrival_time),
        priority=progress.priority,
        num_prompt_tokens=progress.num_prompt_tokens,
        num_prompt_tokens_computed=min(progress.num_computed_tokens, progress.num_prompt_tokens),
        num_output_tokens=progress.num_output_tokens,
        num_preemptions=progress.num_preemptions,
    )


def _phase(progress: RequestProgress) -> Phase:
    """What a running request computes next; one that was preempted computes its output again."""
    if progress.is_done:
        return "padding"
    num_tokens = progress.num_prompt_tokens + progress.num_output_tokens
    num_missing = num_tokens - progress.num_computed_tokens
    return "prefill" if progress.num_output_tokens == 0 or num_missing > 1 else "decode"


def _blocks(stats: SchedulerStats) -> Blocks:
    free = stats.num_blocks_total - stats.num_blocks_used - stats.num_blocks_cached
    return Blocks(stats.num_blocks_used, stats.num_blocks_cached, free)
