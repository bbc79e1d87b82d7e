"""A steady load for a long time: does the throughput hold, and does memory stay flat (Linux).

    python benchmarks/soak.py [--minutes 20] [--rounds 10] [--model MODEL] [--json FILE]

32 streaming clients ask a server without a pause. From when its KV pool is full, what the server
counts is read once a minute. Others may slow the machine down meanwhile, so minutes alone can't
tell a server that has become slow from a machine that has. Hence the server, now aged, is compared
with a fresh one, whose pool is filled first: each in turn gets a slice of the same load, while the
other is idle. Both slices of a round begin with the same lengths and end after the same number of
answers. The exit status is 1 if the median of aged / fresh is below 97 %, or if the aged server's
memory has grown by more than 5 % from the first minute to the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from process_times import resident_bytes, tree_of
from served_share import CONCURRENCY, serving
from steady_load import NUM_LENGTHS, Counters, Load, pool_filled, read_counters, steady_load

from shoal.bench.results.machine import Machine

MINUTE = 60
LEAST_RATIO, ALLOWED_GROWTH = 0.97, 0.05
RAMP_ANSWERS = CONCURRENCY  # by then even the last client's first request has begun
SLICE_ANSWERS = NUM_LENGTHS  # each length once


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
    """Output tokens per second of a slice on each server, and the first as a share of the other."""

    aged: float
    fresh: float
    ratio: float


def output_speed(before: Counters, after: Counters) -> float:
    return (after.output_tokens - before.output_tokens) / (after.time - before.time)


def prompt_speed(before: Counters, after: Counters) -> float:
    return (after.prompt_tokens - before.prompt_tokens) / (after.time - before.time)


async def next_minute(url: str, pid: int, load: Load) -> Minute:
    """Wait a minute and say what it brought."""
    num_answers = load.num_answers
    before = await asyncio.to_thread(read_counters, url)
    await asyncio.sleep(MINUTE)
    after = await asyncio.to_thread(read_counters, url)
    return Minute(
        output_speed(before, after),
        prompt_speed(before, after),
        load.num_answers - num_answers,
        *map(resident_bytes, tree_of(pid)),
    )


async def soak(url: str, pid: int, num_minutes: int) -> list[Minute]:
    """Load the server and watch it; prints a line a minute."""
    minutes = []
    async with steady_load(url, CONCURRENCY) as load:
        await pool_filled(url, CONCURRENCY)
        print("minute  output tokens/s  prompt tokens/s  requests  server MB  engine MB")
        for number in range(1, num_minutes + 1):
            minute = await next_minute(url, pid, load)
            minutes.append(minute)
            print(
                f"{number:6}  {minute.output_tokens_per_second:15,.0f}  "
                f"{minute.prompt_tokens_per_second:15,.0f}  {minute.requests:8}  "
                f"{minute.server_bytes / 1e6:9,.1f}  {minute.engine_bytes / 1e6:9,.1f}",
                flush=True,
            )
    return minutes


async def slice_speed(url: str) -> float:
    """Output tokens per second of a slice of the load."""
    async with steady_load(url, CONCURRENCY) as load:
        await load.answers(RAMP_ANSWERS)
        before = await asyncio.to_thread(read_counters, url)
        await load.answers(RAMP_ANSWERS + SLICE_ANSWERS)
        after = await asyncio.to_thread(read_counters, url)
    return output_speed(before, after)


async def compare(aged_url: str, fresh_url: str, num_rounds: int) -> list[Round]:
    """Slices on both servers, one that was just started beside the other; prints a line a round."""
    async with steady_load(fresh_url, CONCURRENCY):
        await pool_filled(fresh_url, CONCURRENCY)
    rounds = []
    print("round  aged tokens/s  fresh tokens/s  aged / fresh")
    for number in range(1, num_rounds + 1):
        order = [aged_url, fresh_url] if number % 2 else [fresh_url, aged_url]
        speeds = {url: await slice_speed(url) for url in order}
        aged, fresh = speeds[aged_url], speeds[fresh_url]
        rounds.append(Round(aged, fresh, aged / fresh))
        print(f"{number:5}  {aged:13,.0f}  {fresh:14,.0f}  {aged / fresh:12.1%}", flush=True)
    return rounds


def judge(minutes: list[Minute], rounds: list[Round]) -> bool:
    """Print what came of it; returns whether throughput and memory held."""
    first, last = minutes[0], minutes[-1]
    change = last.output_tokens_per_second / first.output_tokens_per_second - 1
    growth = last.memory_bytes / first.memory_bytes - 1
    ratios = [comparison.ratio for comparison in rounds]
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
    with serving(arguments.model) as (pid, aged_url):
        minutes = asyncio.run(soak(aged_url, pid, arguments.minutes))
        with serving(arguments.model) as (_, fresh_url):
            rounds = asyncio.run(compare(aged_url, fresh_url, arguments.rounds))
    machine = Machine.this()
    print(machine.cpu)
    if arguments.json is not None:
        content = {
            "machine": asdict(machine),
            "minutes": [asdict(minute) for minute in minutes],
            "rounds": [asdict(comparison) for comparison in rounds],
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return int(not judge(minutes, rounds))


if __name__ == "__main__":
    sys.exit(main())
