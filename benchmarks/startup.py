"""How long `shoal serve` takes to start, where the time goes, and what memory it holds (Linux).

    python benchmarks/startup.py [--rounds N] [--model MODEL] [--json FILE]

Times count from the start of the process; the model's file has been read before, so that it comes
from the page cache. "health" is the first answer of /health, "ready" that of /ready: from then on
requests are served. The parts are timed in processes of their own, one after another, though the
server does those of its two processes at the same time; they say where to look.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from process_times import resident_bytes, tree_of
from rich.console import Console
from rich.table import Table

from shoal.bench.results.machine import Machine
from shoal.config import EngineConfig
from shoal.model.registry import resolve

POLL_SECONDS = 0.005
MOST_SECONDS = 60.0
ALLOWED_SECONDS = 2.0
ALLOWED_BYTES_OF_FILE = 1.3
ALLOWED_OTHER_BYTES = 300e6

# Name of a part: the statements before it, and those that are timed.
PARTS = {
    "interpreter": ("", "pass"),
    "command line": ("", "import shoal.cli"),
    "server: imports": (
        "import shoal.cli",
        "import shoal.server.launcher, shoal.server.http",
    ),
    "server: application": (
        "from shoal.server.app import create_app; from shoal.server.state import ServerState\n"
        "from shoal.config import EngineConfig; from shoal.engine.client import AsyncEngine",
        "create_app(ServerState(AsyncEngine(EngineConfig()), ['m']))",
    ),
    "engine: imports": ("", "import shoal.engine.process, shoal.executor.native"),
    "both: open the file": (
        "from shoal.model.loader import open_model",
        "open_model(PATH)",
    ),
    "server: tokenizer and template": (
        "from shoal.model.loader import open_model\n"
        "from shoal.engine.loading import load_text_interface\n"
        "model = open_model(PATH)",
        "load_text_interface(model)",
    ),
    "engine: weights and KV pool": (
        "from shoal.model.loader import open_model\n"
        "from shoal.engine.loading import load_engine\n"
        "from shoal.config import EngineConfig\n"
        "import shoal.executor.native\n"
        "model = open_model(PATH)",
        "load_engine(EngineConfig(), model)",
    ),
}


def seconds_of_part(before: str, timed: str, path: Path) -> float:
    """Seconds of statements in a fresh interpreter; without any, of starting and ending one."""
    program = (
        f"import time\nfrom pathlib import Path\nPATH = Path({str(path)!r})\n{before}\n"
        f"start = time.perf_counter()\n{timed}\nprint(time.perf_counter() - start)"
    )
    start = time.perf_counter()
    output = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    ).stdout
    return time.perf_counter() - start if timed == "pass" else float(output.splitlines()[-1])


def environment() -> dict[str, str]:
    """That of an ordinary shell: byte code is kept between starts."""
    return {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_server(model: str) -> dict[str, float]:
    """Seconds to the first answers, and bytes that the server's processes hold then."""
    port = free_port()
    command = [sys.executable, "-m", "shoal.cli", "serve", model, "--port", str(port)]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment()
    )
    try:
        figures = {name: wait_for(port, f"/{name}", start, process) for name in ("health", "ready")}
        return figures | {"resident_bytes": sum(map(resident_bytes, tree_of(process.pid)))}
    finally:
        process.terminate()
        process.wait()


def wait_for(port: int, path: str, start: float, process: subprocess.Popen[bytes]) -> float:
    """Seconds from `start` to the first answer of 200."""
    while process.poll() is None and time.perf_counter() - start < MOST_SECONDS:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=MOST_SECONDS)
        try:
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return time.perf_counter() - start
        except OSError:
            pass  # nobody listens yet
        finally:
            connection.close()
        time.sleep(POLL_SECONDS)
    raise SystemExit(f"the server gave no answer to {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description="How long the server takes to start.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    path = resolve(arguments.model)
    path.read_bytes()
    parts: dict[str, list[float]] = {name: [] for name in PARTS}
    starts = []
    for _ in range(arguments.rounds):
        starts.append(start_server(arguments.model))
        for name, (before, timed) in PARTS.items():
            parts[name].append(seconds_of_part(before, timed, path))
    kv_bytes = EngineConfig().kv_cache_memory_mib * 2**20
    allowed = ALLOWED_BYTES_OF_FILE * path.stat().st_size + kv_bytes + ALLOWED_OTHER_BYTES
    resident = max(start["resident_bytes"] for start in starts)
    table = Table("", "median", "allowed", title="starting to serve")
    for name in ("health", "ready"):
        seconds = statistics.median(start[name] for start in starts)
        table.add_row(name, f"{seconds:.3f} s", f"{ALLOWED_SECONDS:g} s" if name == "ready" else "")
    # The pool becomes memory only as its blocks are used, hence its bytes count in full here.
    table.add_row(
        "memory, KV pool full", f"{(resident + kv_bytes) / 1e6:,.0f} MB", f"{allowed / 1e6:,.0f} MB"
    )
    table.add_section()
    for name, seconds in parts.items():
        table.add_row(name, f"{statistics.median(seconds):.3f} s", "")
    machine = Machine.this()
    console = Console()
    console.print(f"{machine.cpu}, {arguments.model}")
    console.print(table)
    if arguments.json is not None:
        content = {"machine": asdict(machine), "starts": starts, "parts": parts}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
