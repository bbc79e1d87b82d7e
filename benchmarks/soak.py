"""A steady load for a long time: does the throughput hold, and does memory stay flat (Linux).

    python benchmarks/soak.py [--minutes 20] [--rounds 10] [--model MODEL] [--json FILE]

32 streaming clients ask a server without a pause. From when its KV pool is full, what the server
counts is read once a minute. Others may slow the machine down meanwhile, so minutes alone can't
tell a server that has become slow from a machine that has. Hence the server, now aged, is compared
with a fresh one, whose pool is filled first: both have the same load, and run in turns of a second
while the processes of the other are stopped. A round is 30 turns of each. The exit status is 1 if
the median of aged / fresh is below 97 %, or if the aged server's memory has grown by more than 5 %
from the first minute to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from process_times import resident_bytes, tree_of
from served_share import CONCURRENCY, serving
from steady_load import Counters, Load, pool_filled, read_counters, steady_load

from shoal.bench.results.machine import Machine
from shoal.bench.results.output_path import require_writable

MINUTE = 60
LEAST_RATIO, ALLOWED_GROWTH = 0.97, 0.05
TURN_SECONDS = 1
TURNS = 30  # of each server in a round
RAMP_TURNS = 10  # by then even the last client's first request has begun


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    url: str


@dataclass(frozen=True, slots=True)
class Minute:
    """What a minute brought, and the memory at its end."""

    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests: int
    server_bytes: int
    engine_bytes: int

    @property
    def memory_bytes(self) -> int:
        return self.server_bytes + self.engine_bytes


@dataclass(frozen=True, slots=True)
class Round:
    """Output tokens per second of each server in its turns, and aged / fresh."""

    aged: float
    fresh: float
    ratio: float


def output_speed(before: Counters, after: Counters) -> float:
    return (after.output_tokens - before.output_tokens) / (after.time - before.time)


def prompt_speed(before: Counters, after: Counters) -> float:
    return (after.prompt_tokens - before.prompt_tokens) / (after.time - before.time)


async def next_minute(server: Server, load: Load) -> Minute:
    """Wait a minute and say what it brought."""
    num_answers = load.num_answers
    before = await asyncio.to_thread(read_counters, server.url)
    await asyncio.sleep(MINUTE)
    after = await asyncio.to_thread(read_counters, server.url)
    return Minute(
        output_speed(before, after),
        prompt_speed(before, after),
        load.num_answers - num_answers,
        *map(resident_bytes, tree_of(server.pid)),
    )


async def soak(server: Server, num_minutes: int) -> list[Minute]:
    """Load the server and watch it; prints a line a minute."""
    minutes = []
    async with steady_load(server.url, CONCURRENCY) as load:
        await pool_filled(server.url, CONCURRENCY)
        print("minute  output tokens/s  prompt tokens/s  requests  server MB  engine MB")
        for number in range(1, num_minutes + 1):
            minute = await next_minute(server, load)
            minutes.append(minute)
            print(
                f"{number:6}  {minute.output_tokens_per_second:15,.0f}  "
                f"{minute.prompt_tokens_per_second:15,.0f}  {minute.requests:8}  "
                f"{minute.server_bytes / 1e6:9,.1f}  {minute.engine_bytes / 1e6:9,.1f}",
                flush=True,
            )
    return minutes


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    """Processes stand still meanwhile, except where they are `resumed`."""
    send(signal.SIGSTOP, pids)
    try:
        yield
    finally:
        send(signal.SIGCONT, pids)


@contextmanager
def resumed(pids: Sequence[int]) -> Iterator[None]:
    send(signal.SIGCONT, pids)
    try:
        yield
    finally:
        send(signal.SIGSTOP, pids)


def send(number: signal.Signals, pids: Sequence[int]) -> None:
    for pid in pids:
        os.kill(pid, number)


async def speeds_in_turns(servers: Sequence[Server], num_turns: int) -> list[float]:
    """Output tokens per second of servers under load, each over its own turns."""
    tokens, seconds = [0.0] * len(servers), [0.0] * len(servers)
    for _ in range(num_turns):
        for i, server in enumerate(servers):
            with resumed(tree_of(server.pid)):
                before = await asyncio.to_thread(read_counters, server.url)
                await asyncio.sleep(TURN_SECONDS)
                after = await asyncio.to_thread(read_counters, server.url)
            tokens[i] += after.output_tokens - before.output_tokens
            seconds[i] += after.time - before.time
    return [count / time for count, time in zip(tokens, seconds, strict=True)]


async def compare(aged: Server, fresh: Server, num_rounds: int) -> list[Round]:
    """Both servers in turns, one that was just started beside the other; prints a line a round."""
    async with steady_load(fresh.url, CONCURRENCY):
        await pool_filled(fresh.url, CONCURRENCY)
    rounds = []
    print("round  aged tokens/s  fresh tokens/s  aged / fresh")
    async with steady_load(aged.url, CONCURRENCY), steady_load(fresh.url, CONCURRENCY):
        with stopped(tree_of(aged.pid)), stopped(tree_of(fresh.pid)):
            await speeds_in_turns([aged, fresh], RAMP_TURNS)
            for number in range(1, num_rounds + 1):
                aged_speed, fresh_speed = await speeds_in_turns([aged, fresh], TURNS)
                one = Round(aged_speed, fresh_speed, aged_speed / fresh_speed)
                rounds.append(one)
                line = f"{number:5}  {one.aged:13,.0f}  {one.fresh:14,.0f}  {one.ratio:12.1%}"
                print(line, flush=True)
    return rounds


def judge(minutes: list[Minute], rounds: list[Round]) -> bool:
    """Print what came of it; returns whether throughput and memory held."""
    first, last = minutes[0], minutes[-1]
    change = last.output_tokens_per_second / first.output_tokens_per_second - 1
    growth = last.memory_bytes / first.memory_bytes - 1
    ratios = [one.ratio for one in rounds]
    ratio = statistics.median(ratios)
    is_fast, is_flat = ratio >= LEAST_RATIO, growth <= ALLOWED_GROWTH
    print(
        f"From the first minute to the last: {change:+.1%} output tokens/s, changes of the "
        f"machine's speed included; {growth:+.1%} memory.\n"
        f"Aged / fresh: median {ratio:.1%}, {min(ratios):.1%} to {max(ratios):.1%} in "
        f"{len(ratios)} rounds.\n"
        f"The throughput {'held' if is_fast else 'did not hold'} (at least {LEAST_RATIO:.0%} of a "
        f"fresh server's), memory {'is flat' if is_flat else 'grew'} (at most "
        f"{ALLOWED_GROWTH:+.0%})."
    )
    return is_fast and is_flat


def main() -> int:
    parser = argparse.ArgumentParser(description="A steady load for a long time.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--minutes", type=int, default=20, help="at least 2")
    parser.add_argument("--rounds", type=int, default=10, help="at least 1")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.minutes < 2 or arguments.rounds < 1:
        parser.error(f"needs 2 minutes and a round, got {arguments.minutes} and {arguments.rounds}")
    if arguments.json is not None:
        require_writable("--json", arguments.json)
    # In the background, too, servers are to be ended and not to be left stopped.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with serving(arguments.model) as aged_address:
        aged = Server(*aged_address)
        minutes = asyncio.run(soak(aged, arguments.minutes))
        with serving(arguments.model) as fresh_address:
            rounds = asyncio.run(compare(aged, Server(*fresh_address), arguments.rounds))
    machine = Machine.this()
    print(machine.cpu)
    if arguments.json is not None:
        content = {
            "machine": asdict(machine),
            "minutes": [asdict(minute) for minute in minutes],
            "rounds": [asdict(one) for one in rounds],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(not judge(minutes, rounds))


if __name__ == "__main__":
    sys.exit(main())
