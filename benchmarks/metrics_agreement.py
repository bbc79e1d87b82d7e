"""Whether `shoal bench serve` and the server's own metrics tell the same about the same requests.

Needs a Shoal server that serves nobody else. The client's times begin when a request was due, the
server's when its first bytes came; what lies between, and the way back, is the difference.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from shoal.bench.results.machine import Machine

WORKLOADS = {
    "50-800 in, 20-200 out": "--input-len 50:800 --output-len 20:200",
    "20-200 in, 20-60 out": "--input-len 20:200 --output-len 20:60",
    "10 in, 20-60 out": "--input-len 10 --output-len 20:60",
}
LATENCIES = {
    "ttft": "shoal:time_to_first_token_seconds",
    "tpot": "shoal:time_per_output_token_seconds",
    "e2e": "shoal:e2e_request_latency_seconds",
}
COUNTS = {
    "requests_completed": "shoal:e2e_request_latency_seconds_count",
    "input_tokens": "shoal:prompt_tokens_total",
    "output_tokens": "shoal:generation_tokens_total",
}


def read_metrics(base_url: str) -> Counter[str]:
    """The sum of the samples of each name."""
    with urllib.request.urlopen(f"{base_url}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    sums: Counter[str] = Counter()
    for family in families:
        for sample in family.samples:
            sums[sample.name] += sample.value
    return sums


def run_load(base_url: str, flags: str) -> dict[str, float]:
    """The figures of one run of the load generator, without a warm-up."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        command = [sys.executable, "-m", "shoal.cli", "bench", "serve", "--base-url", base_url]
        command += ["--warm-up-requests", "0", "--json", str(path), *flags.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(path.read_text())["figures"]


def compare(base_url: str, flags: str) -> dict[str, dict[str, float]]:
    """What both sides say about one run; times in milliseconds."""
    before = read_metrics(base_url)
    figures = run_load(base_url, flags)
    counted = read_metrics(base_url)
    counted.subtract(before)
    rows = {
        name: {"client": figures[name], "server": counted[metric]}
        for name, metric in COUNTS.items()
    }
    for name, metric in LATENCIES.items():
        mean = counted[f"{metric}_sum"] / counted[f"{metric}_count"]
        rows[f"{name}_mean_ms"] = {"client": figures[f"{name}_mean_ms"], "server": mean * 1e3}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--num-requests", type=int, default=40, help="of each run")
    parser.add_argument("--concurrency", type=int, default=6, help="of the closed loop")
    parser.add_argument("--request-rate", type=float, default=2.0, help="of the open loop")
    parser.add_argument("--json", type=Path, help="file to write the result to")
    arguments = parser.parse_args()

    loops = (f"--request-rate {arguments.request_rate}", f"--concurrency {arguments.concurrency}")
    runs = []
    for title, lengths in WORKLOADS.items():
        for loop in loops:
            flags = f"--num-requests {arguments.num_requests} {lengths} {loop}"
            rows = compare(arguments.base_url, flags)
            runs.append({"workload": title, "arrivals": loop, "figures": rows})
            print(f"{title}, {loop}")
            for name, row in rows.items():
                difference = row["client"] - row["server"]
                share = difference / row["server"]
                print(
                    f"  {name:20}{row['client']:12.3f}{row['server']:12.3f}"
                    f"{difference:+10.3f}{share:+10.2%}",
                    flush=True,
                )
    if arguments.json is not None:
        result = {"machine": asdict(Machine.this()), "runs": runs}
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
