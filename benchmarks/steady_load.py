"""Streaming clients that ask a server without a pause, and what the server counts meanwhile.

Prompts are all different, so that nothing is found in the prefix cache and it is full of what is
never asked again. Their lengths come round and round in one order, the same for every load.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

INPUT_LEN, OUTPUT_LEN = (50, 800), (20, 200)
NUM_LENGTHS = 64
TOKEN_IDS = (1000, 30000)  # ordinary words of most models
LAST_CHUNK = b"\r\n0\r\n\r\n"  # of an HTTP body
MAX_ANSWER_BYTES = 1 << 20
POLL_SECONDS = 0.2


class LoadError(Exception):
    """The server refused a request or broke off an answer."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server has counted until `time`, in seconds of a monotonic clock."""

    time: float
    output_tokens: float
    prompt_tokens: float


class Load:
    """The clients of one server; see `steady_load`."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._host, self._port = address.hostname, address.port
        self._bodies = request_bodies()
        self.num_answers = 0

    async def ask_on_and_on(self) -> None:
        """Be one client, until cancelled."""
        reader, writer = await asyncio.open_connection(
            self._host, self._port, limit=MAX_ANSWER_BYTES
        )
        try:
            for body in self._bodies:
                head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(head.encode() + body)
                await read_answer(reader)
                self.num_answers += 1
        finally:
            writer.close()  # the server aborts a request that it hasn't answered yet


async def read_answer(reader: asyncio.StreamReader) -> None:
    status = await reader.readline()
    if b" 200 " not in status:
        raise LoadError(f"the server answered {status.decode().strip()!r}")
    answer = await reader.readuntil(LAST_CHUNK)
    if not answer.endswith(b"data: [DONE]\n\n" + LAST_CHUNK):
        raise LoadError(f"an answer broke off: {answer[-500:].decode()}")


@asynccontextmanager
async def steady_load(url: str, num_clients: int) -> AsyncIterator[Load]:
    """A load for as long as the context lasts; the server is idle when it has been left."""
    load = Load(url)
    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(load.ask_on_and_on()) for _ in range(num_clients)]
        yield load
        for client in clients:
            client.cancel()
    while await asyncio.to_thread(num_requests, url) > 0:
        await asyncio.sleep(POLL_SECONDS)


async def pool_filled(url: str, num_clients: int) -> None:
    """Wait until the KV pool of a loaded server is full, so that blocks must be evicted."""
    # Of a request that ends only the last block, partly filled, becomes empty again.
    while await asyncio.to_thread(num_empty_blocks, url) > num_clients:
        await asyncio.sleep(POLL_SECONDS)


def request_bodies() -> Iterator[bytes]:
    """Different prompts without end, whose lengths recur in one order."""
    chance = random.Random(0)
    lengths = [
        (chance.randint(*INPUT_LEN), chance.randint(*OUTPUT_LEN)) for _ in range(NUM_LENGTHS)
    ]
    words = random.Random()  # seeded by the system: no load has the prompts of another
    for num_input, num_output in itertools.cycle(lengths):
        body = {
            "prompt": [words.randint(*TOKEN_IDS) for _ in range(num_input)],
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        yield json.dumps(body).encode()


def read_metrics(url: str) -> list[Sample]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    return [sample for family in families for sample in family.samples]


def value_of(metrics: list[Sample], name: str, **labels: str) -> float:
    return next(
        sample.value for sample in metrics if (sample.name, sample.labels) == (name, labels)
    )


def read_counters(url: str) -> Counters:
    metrics = read_metrics(url)
    names = "shoal:generation_tokens_total", "shoal:prompt_tokens_total"
    return Counters(time.monotonic(), *(value_of(metrics, name) for name in names))


def num_empty_blocks(url: str) -> float:
    """How many KV blocks hold nothing, neither of a request nor for the prefix cache."""
    return value_of(read_metrics(url), "shoal:num_blocks", state="empty")


def num_requests(url: str) -> float:
    """How many requests the server has in its queue and its batch."""
    metrics = read_metrics(url)
    names = "shoal:num_requests_running", "shoal:num_requests_waiting"
    return sum(value_of(metrics, name) for name in names)
