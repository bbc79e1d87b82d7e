"""An engine whose answers and faults are scripted, behind the real server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from shoal.config import EngineConfig
from shoal.engine.inputs import DEFAULT_OPTIONS
from shoal.engine.messages import EngineInfo
from shoal.engine.outputs import CompletionDelta
from shoal.model.chat import ChatTemplate
from shoal.model.tokenizer import Tokenizer
from shoal.request import FinishReason, RequestOptions, SamplingParams, TokenLogprob
from shoal.scheduler.interface import BatchView, SchedulerStats
from shoal.server.http import HttpServer
from shoal.server.state import ServerState

Script = Callable[[list[int], SamplingParams], AsyncIterator[CompletionDelta]]


@dataclass
class FakeEngine:
    """Implements `shoal.server.state.Engine`; `script` makes the deltas of a request."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    script: Script
    is_alive: bool = True
    is_ready: bool = True
    observers: list[Callable[[SchedulerStats], None]] = field(default_factory=list)
    num_cached_blocks: int = 0
    options: list[RequestOptions] = field(default_factory=list)
    requests: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    config: EngineConfig = field(default_factory=EngineConfig)
    batch: BatchView = field(default_factory=lambda: BatchView([], []))
    num_views: int = 0
    num_running: int = 0
    num_aborted: int = 0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model="fake",
            max_model_len=256,
            vocab_size=self.tokenizer.vocab_size,
            num_blocks=8,
            block_size=16,
            num_threads=1,
            isa="none",
        )

    def watch_stats(self, observer: Callable[[SchedulerStats], None]) -> None:
        self.observers.append(observer)

    def report(self, **stats: int) -> None:
        """A snapshot of the scheduler; what isn't given is 0."""
        required = ("num_requests_running", "num_requests_waiting", "num_blocks_used")
        snapshot = dict.fromkeys((*required, "num_preemptions"), 0) | {"num_blocks_total": 8}
        for observer in self.observers:
            observer(SchedulerStats(**(snapshot | stats)))

    async def reset_prefix_cache(self) -> int:
        num_blocks, self.num_cached_blocks = self.num_cached_blocks, 0
        return num_blocks

    async def view_batch(self) -> BatchView:
        self.num_views += 1
        return self.batch

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> AsyncIterator[CompletionDelta]:
        self.requests.append((prompt_token_ids, params))
        self.options.append(options)
        self.num_running += 1
        ended = False
        try:
            async for delta in self.script(prompt_token_ids, params):
                yield delta
            ended = True
        finally:
            self.num_running -= 1
            self.num_aborted += not ended


def answer(text: str, tokenizer: Tokenizer) -> Script:
    """Every sample answers `text`, a token a delta."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
        token_ids = tokenizer.encode(text)
        for position, token_id in enumerate(token_ids):
            for index in range(params.n):
                last = position == len(token_ids) - 1
                delta = CompletionDelta(
                    index=index,
                    text=tokenizer.decode([token_id], continues_text=True),
                    token_ids=[token_id],
                    finish_reason=FinishReason.STOP if last else None,
                )
                if params.logprobs is not None:
                    delta.logprobs = [logprob(token_id)]
                if params.prompt_logprobs is not None and position == index == 0:
                    delta.prompt_logprobs = [logprob(token) for token in prompt[1:]]
                yield delta
        await asyncio.sleep(0)

    return script


def logprob(token_id: int) -> TokenLogprob:
    """An entry whose numbers can be told from the token."""
    return TokenLogprob(token_id, -token_id / 100, [(token_id, -token_id / 100), (0, -9.0)])


async def endless(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
    """A token each 10 ms, for ever."""
    while True:
        yield CompletionDelta(text="x", token_ids=[1])
        await asyncio.sleep(0.01)


async def queued(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
    """Never begins."""
    await asyncio.Event().wait()
    yield CompletionDelta()


@contextlib.asynccontextmanager
async def serving(engine: FakeEngine, **settings: Any) -> AsyncIterator[Served]:
    """The server on a free port, in this event loop."""
    state = ServerState(engine=engine, model_names=("fake", "alias"), **settings)
    server = HttpServer(state)
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
        try:
            yield Served(client, state, port)
        finally:
            server.should_exit = server.force_exit = True
            await task


@dataclass
class Served:
    client: httpx.AsyncClient
    state: ServerState
    port: int


async def send_raw(served: Served, body: dict[str, Any]) -> asyncio.StreamWriter:
    """Post a completion on a connection of its own and return it without reading."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.port)
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()
    return writer


async def stream(served: Served, path: str, **body: Any) -> list[Any]:
    """The data of a stream's events; the final "[DONE]" as a string."""
    body |= {"stream": True}
    async with served.client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in response.aiter_lines()]
    events = [line.removeprefix("data: ") for line in lines if line]
    return [data if data == "[DONE]" else json.loads(data) for data in events]


async def eventually(condition: Callable[[], bool], seconds: float = 2.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
