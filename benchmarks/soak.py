"""A steady load for a long time: does the throughput hold, and does memory stay flat (Linux).

    python benchmarks/soak.py [--minutes 20] [--model MODEL] [--json FILE]

Streaming clients ask a server of its own without a pause. Prompts are all different, so that the
prefix cache is full of what is never asked again, but their lengths come round and round in one
order, so that each minute has the same work. What the server counts is read once a minute, after a
warm-up in which the KV pool fills. Others may slow the machine down: once a second a small piece of
work, always the same, says how fast it is. The exit status is 1 if the last minute is slower than
the first by more than 3 % for the speed of the machine, or memory has grown by more than 5 % since.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from process_times import resident_bytes, tree_of
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from served_share import CONCURRENCY, serving

from shoal.bench.results.machine import Machine

INPUT_LEN, OUTPUT_LEN = (50, 800), (20, 200)
NUM_LENGTHS = 64
TOKEN_IDS = (1000, 40000)  # ordinary words of any model
WARM_UP_SECONDS = MINUTE = 60
ALLOWED_SLOWDOWN, ALLOWED_GROWTH = 0.03, 0.05
LAST_CHUNK = b"\r\n0\r\n\r\n"  # of an HTTP body
MAX_ANSWER_BYTES = 1 << 20
PROBE = np.linspace(0.5, 1.5, 4096, dtype=np.float32)
PROBE_PASSES = 1000
COUNTERS = ("shoal:generation_tokens_total", "shoal:prompt_tokens_total")


@dataclass(frozen=True, slots=True)
class Minute:
    """What a minute brought, and the memory at its end."""

    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests: int
    server_bytes: int
    engine_bytes: int
    machine_speed: float  # probes a second of CPU time


class Clients:
    """Streaming clients that ask on and on."""

    def __init__(self, url: str, count: int) -> None:
        self._address = urlsplit(url).netloc.split(":")
        self._count = count
        self._bodies = request_bodies()
        self.num_answers = 0

    async def run(self) -> None:
        """Ask until cancelled."""
        await asyncio.gather(*(self._ask_on_and_on() for _ in range(self._count)))

    async def _ask_on_and_on(self) -> None:
        host, port = self._address
        reader, writer = await asyncio.open_connection(host, int(port), limit=MAX_ANSWER_BYTES)
        for body in self._bodies:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}"
            writer.write(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + body)
            status = await reader.readline()
            if b" 200 " not in status:
                raise SystemExit(f"the server answered {status.decode().strip()}")
            answer = await reader.readuntil(LAST_CHUNK)
            if not answer.endswith(b"data: [DONE]\n\n" + LAST_CHUNK):
                raise SystemExit(f"an answer broke off: {answer[-500:].decode()}")
            self.num_answers += 1


def request_bodies() -> Iterator[bytes]:
    """Different prompts without end, whose lengths recur in one order."""
    chance = random.Random(0)
    lengths = [
        (chance.randint(*INPUT_LEN), chance.randint(*OUTPUT_LEN)) for _ in range(NUM_LENGTHS)
    ]
    for num_input, num_output in itertools.cycle(lengths):
        body = {
            "prompt": [chance.randint(*TOKEN_IDS) for _ in range(num_input)],
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        yield json.dumps(body).encode()


def read_counters(url: str) -> list[float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    values = {sample.name: sample.value for family in families for sample in family.samples}
    return [values[name] for name in COUNTERS]


def probe_speed() -> float:
    """How often the probe could be computed in a second of this thread's CPU time."""
    values = PROBE.copy()
    start = time.thread_time()
    for _ in range(PROBE_PASSES):
        np.multiply(values, PROBE, out=values)
        np.sqrt(values, out=values)
    return 1 / (time.thread_time() - start)


async def next_minute(url: str, pid: int, clients: Clients) -> Minute:
    """Wait a minute and say what it brought."""
    loop = asyncio.get_running_loop()
    start, num_answers = loop.time(), clients.num_answers
    before = await asyncio.to_thread(read_counters, url)
    speeds = []
    while loop.time() - start < MINUTE:
        speeds.append(probe_speed())
        await asyncio.sleep(1)
    after = await asyncio.to_thread(read_counters, url)
    seconds = loop.time() - start
    output, prompt = ((now - then) / seconds for then, now in zip(before, after, strict=True))
    server_bytes, engine_bytes = map(resident_bytes, tree_of(pid))
    requests = clients.num_answers - num_answers
    speed = statistics.median(speeds)
    return Minute(output, prompt, requests, server_bytes, engine_bytes, speed)


async def soak(url: str, pid: int, num_minutes: int) -> list[Minute]:
    """Load the server and watch it; prints a line a minute."""
    clients = Clients(url, CONCURRENCY)
    load = asyncio.create_task(clients.run())
    await asyncio.wait({load}, timeout=WARM_UP_SECONDS)
    minutes: list[Minute] = []
    print("minute  output tokens/s  prompt tokens/s  requests  server MB  engine MB  machine")
    for number in range(1, num_minutes + 1):
        watch = asyncio.create_task(next_minute(url, pid, clients))
        await asyncio.wait({load, watch}, return_when=asyncio.FIRST_COMPLETED)
        if load.done():
            load.result()  # it ends only by an error
        minute = await watch
        minutes.append(minute)
        print(
            f"{number:6}  {minute.output_tokens_per_second:15,.0f}  "
            f"{minute.prompt_tokens_per_second:15,.0f}  {minute.requests:8}  "
            f"{minute.server_bytes / 1e6:9,.1f}  {minute.engine_bytes / 1e6:9,.1f}  "
            f"{minute.machine_speed / minutes[0].machine_speed:7.0%}",
            flush=True,
        )
    load.cancel()
    await asyncio.wait({load})
    return minutes


def main() -> int:
    parser = argparse.ArgumentParser(description="A steady load for a long time.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with serving(arguments.model) as (pid, url):
        minutes = asyncio.run(soak(url, pid, arguments.minutes))
    first, last = minutes[0], minutes[-1]
    tokens = last.output_tokens_per_second / first.output_tokens_per_second
    machine_speed = last.machine_speed / first.machine_speed
    speed = tokens / machine_speed - 1
    memory = (last.server_bytes + last.engine_bytes) / (first.server_bytes + first.engine_bytes) - 1
    machine = Machine.this()
    Console().print(
        f"{machine.cpu}: from the first minute to the last {tokens - 1:+.1%} tokens/s, "
        f"{machine_speed - 1:+.1%} speed of the machine, {speed:+.1%} tokens/s at equal speed, "
        f"{memory:+.1%} memory"
    )
    if arguments.json is not None:
        content = {"machine": asdict(machine), "minutes": [asdict(minute) for minute in minutes]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(speed < -ALLOWED_SLOWDOWN or memory > ALLOWED_GROWTH)


if __name__ == "__main__":
    sys.exit(main())
