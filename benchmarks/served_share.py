"""What of the offline throughput is left over HTTP, with the load generator on the same cores.

    python benchmarks/served_share.py [--rounds N] [--num-requests N] [--json FILE]

Both take the same lengths, 32 requests at a time, in turn: `shoal bench throughput`, then
`shoal bench serve` with 32 streaming clients on a server that is idle meanwhile. Besides the ratio
the table has the CPU time of each process for an output token (Linux).
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from process_times import tree_of, tree_seconds
from rich.console import Console
from rich.table import Table
from startup import free_port, wait_for

from shoal.bench.results.machine import Machine

CONCURRENCY = 32
LENGTHS = ["--input-len", "50:800", "--output-len", "20:200"]
ALLOWED_SHARE = 0.8


def shoal(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli", *arguments]


@contextmanager
def serving(model: str) -> Iterator[tuple[int, str]]:
    """A server; gives its process id and its URL."""
    port = free_port()
    flags = ["--port", str(port), "--max-num-seqs", str(CONCURRENCY), "--log-level", "warning"]
    start = time.perf_counter()
    process = subprocess.Popen(shoal("serve", model, *flags), stdout=subprocess.DEVNULL)
    try:
        wait_for(port, "/ready", start, process)
        yield process.pid, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def run(*arguments: str) -> tuple[dict[str, float], float]:
    """The figures of a benchmark, and the CPU seconds of its process."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = shoal("bench", *arguments, "--json", str(path), *LENGTHS)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return json.loads(path.read_text())["figures"], seconds


def offline(model: str, workload: list[str]) -> dict[str, float]:
    flags = ["--model", model, "--max-num-seqs", str(CONCURRENCY)]
    figures, seconds = run("throughput", *flags, *workload)
    return {
        "offline tokens/s": figures["output_tokens_per_second"],
        "offline: all, us/token": 1e6 * seconds / figures["output_tokens"],
    }


def served(pid: int, url: str, workload: list[str]) -> dict[str, float]:
    _, engine_pid = tree_of(pid)
    before = tree_seconds(pid), tree_seconds(engine_pid)
    flags = ["--base-url", url, "--concurrency", str(CONCURRENCY)]
    figures, load_seconds = run("serve", *flags, *workload)
    both, engine = tree_seconds(pid) - before[0], tree_seconds(engine_pid) - before[1]
    tokens = figures["output_tokens"]
    return {
        "served tokens/s": figures["output_tokens_per_second"],
        "served: engine, us/token": 1e6 * engine / tokens,
        "served: HTTP server, us/token": 1e6 * (both - engine) / tokens,
        "served: load generator, us/token": 1e6 * load_seconds / tokens,
    }


def show(rounds: list[dict[str, float]], wanted: str, path: Path | None) -> None:
    """A table of medians over the rounds; and all that was measured, as JSON in `path`."""
    table = Table("", "median", "lowest", "highest")
    for name in rounds[0]:
        values = [figures[name] for figures in rounds]
        cells = (statistics.median(values), min(values), max(values))
        table.add_row(name, *(f"{value:,.0f}" if value > 20 else f"{value:.2f}" for value in cells))
    machine = Machine.this()
    console = Console()
    console.print(f"{machine.cpu}; {wanted}")
    console.print(table)
    if path is not None:
        content = {"machine": asdict(machine), "rounds": rounds}
        path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="What of the throughput is left over HTTP.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=96)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = []
    with serving(arguments.model) as (pid, url):
        for number in range(arguments.rounds):
            workload = ["--num-requests", str(arguments.num_requests)]
            workload += ["--workload-seed", str(number)]
            figures = offline(arguments.model, workload) | served(pid, url, workload)
            figures["share"] = figures["served tokens/s"] / figures["offline tokens/s"]
            rounds.append(figures)
            print(f"round {number}: {figures['share']:.1%}", file=sys.stderr)
    show(rounds, f"share: at least {ALLOWED_SHARE:.0%} wanted", arguments.json)


if __name__ == "__main__":
    main()
