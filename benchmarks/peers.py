"""Compares Shoal with its peers in one run, in alternating rounds, on one machine.

    python benchmarks/setup_peers.py                    # once
    python benchmarks/peers.py --json result.json

Every engine lives in a process and a virtual environment of its own (workers/), loads once and
answers jobs one at a time: A B C, A B C, ... All engines get the same token ids and must return
the same numbers of tokens. The table gives medians over the rounds and the median over the rounds
of each peer's ratio to Shoal. docs/benchmarking.md defines the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from process_times import machine_seconds, tree_seconds
from rich.console import Console
from rich.table import Table
from setup_peers import ROOT, interpreter, model_file
from workers.protocol import Engine, Job, Measurement

from shoal.bench.results.machine import Machine
from shoal.bench.workloads.workload import (
    LengthRange,
    Workload,
    WorkloadRequest,
    generate_requests,
    ordinary_token_ids,
)
from shoal.engine.loading import load_text_interface
from shoal.model.loader import open_model
from shoal.model.registry import resolve

WORKERS = Path(__file__).parent / "workers"
MAX_NUM_SEQS = 32
IDLE_LIMIT = 0.02  # CPU seconds a second that all idle engines together may use


def fixed(num_requests: int, num_input: int, num_output: int) -> Workload:
    """Requests of one length."""
    return Workload(
        num_requests=num_requests,
        input_len=LengthRange(num_input, num_input),
        output_len=LengthRange(num_output, num_output),
    )


CASES = {
    "workload": Workload(),
    "decode-1": fixed(1, 128, 64),
    "decode-8": fixed(8, 128, 64),
    "decode-32": fixed(32, 128, 64),
    "prefill-8x128": fixed(8, 128, 1),
    "prefill-1x2000": fixed(1, 2000, 1),
}
WARM_UP = {"workload": fixed(4, 64, 8), "decode": fixed(4, 64, 8), "prefill": fixed(4, 64, 1)}

PEERS = {
    "shoal": ("shoal", "Q4_1"),
    "shoal-avx512": ("shoal", "Q4_1"),
    "openvino-q4_0": ("openvino", "Q4_0"),
    "openvino-q8_0": ("openvino", "Q8_0"),
    "llama.cpp-q4_0": ("llama.cpp", "Q4_0"),
    "llama.cpp-q8_0": ("llama.cpp", "Q8_0"),
    "llama.cpp-q4_1": ("llama.cpp", "Q4_1"),
}
FLAGS = {"shoal-avx512": ["--instruction-set", "avx512"]}
ALWAYS = [name for name in PEERS if name not in FLAGS]  # on any machine
WORKER_SCRIPTS = {
    "shoal": "worker_shoal.py",
    "openvino": "worker_openvino.py",
    "llama.cpp": "worker_llama.py",
}


def rate(kind: str, measurement: Measurement) -> float:
    """The figure of a case in tokens a second: output, decode or prompt tokens by its kind."""
    if kind == "workload":
        return measurement.output_tokens / measurement.seconds
    if kind == "decode":
        return measurement.decode_tokens / measurement.decode_seconds
    return measurement.input_tokens / measurement.seconds


class Worker:
    """An engine in its own process."""

    def __init__(self, name: str, root: Path, threads: int) -> None:
        engine, weights = PEERS[name]
        python = sys.executable if engine == "shoal" else str(interpreter(root, engine))
        model = resolve("smollm2-135m") if weights == "Q4_1" else model_file(root, weights)
        self.name = name
        command = [python, str(WORKERS / WORKER_SCRIPTS[engine]), str(model)]
        command += ["--weights", weights, "--threads", str(threads)]
        command += ["--max-num-seqs", str(MAX_NUM_SEQS), *FLAGS.get(name, [])]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.engine = Engine(**self._read())

    def run(self, job: Job) -> Measurement:
        """Run a job to its end.

        Raises:
            RuntimeError: the worker has ended.
        """
        assert self._process.stdin is not None
        print(json.dumps(asdict(job)), file=self._process.stdin, flush=True)
        return Measurement(**self._read())

    def cpu_seconds(self) -> float:
        """CPU time used so far, with its children."""
        return tree_seconds(self._process.pid)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        return json.loads(line)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured job."""

    case: str
    engine: str
    round: int
    tokens_per_second: float
    measurement: Measurement
    background_cpus: float  # CPUs that all other processes used meanwhile
    idle_cpus: float  # CPUs that the waiting engines used meanwhile


@dataclass(slots=True)
class Comparison:
    """The samples of a run, and what the table says about them."""

    samples: list[Sample] = field(default_factory=list)

    def rates(self, case: str, engine: str) -> list[float]:
        """Tokens a second of a case, by round."""
        return [
            sample.tokens_per_second
            for sample in self.samples
            if sample.case == case and sample.engine == engine
        ]

    def ratio(self, case: str, engine: str, baseline: str) -> float:
        """The median over the rounds of engine / baseline."""
        pairs = zip(self.rates(case, engine), self.rates(case, baseline), strict=True)
        return statistics.median(rate / base for rate, base in pairs)

    def idle_cpus(self) -> float:
        """The most that waiting engines used."""
        return max(sample.idle_cpus for sample in self.samples)

    def background_cpus(self) -> float:
        """The median of what others used."""
        return statistics.median(sample.background_cpus for sample in self.samples)


def make_job(case: str, requests: list[WorkloadRequest]) -> Job:
    """The job of a case, whose name begins with its kind."""
    return Job(
        kind=case.partition("-")[0],
        prompts=[request.prompt_token_ids for request in requests],
        max_tokens=[request.max_tokens for request in requests],
        max_num_seqs=MAX_NUM_SEQS,
    )


def measure(worker: Worker, others: list[Worker], case: str, number: int, job: Job) -> Sample:
    """Run a job on one engine while the others wait."""
    machine, own = machine_seconds(), worker.cpu_seconds()
    idle = sum(other.cpu_seconds() for other in others)
    start = time.perf_counter()
    measurement = worker.run(job)
    elapsed = time.perf_counter() - start  # longer than the measurement where a tool loads first
    machine, own = machine_seconds() - machine, worker.cpu_seconds() - own
    idle = sum(other.cpu_seconds() for other in others) - idle
    return Sample(
        case=case,
        engine=worker.name,
        round=number,
        tokens_per_second=rate(job.kind, measurement),
        measurement=measurement,
        background_cpus=max(0.0, machine - own - idle) / elapsed,
        idle_cpus=idle / elapsed,
    )


def compare(
    workers: list[Worker], cases: list[str], rounds: int, seed: int, token_ids: list[int]
) -> Comparison:
    """Warm every engine up, then run the cases in rounds; prompts are fresh in each round."""
    for worker in workers:
        for kind in sorted({case.partition("-")[0] for case in cases}):
            worker.run(make_job(kind, generate_requests(WARM_UP[kind], token_ids)))
    comparison = Comparison()
    for number in range(rounds):
        for case in cases:
            requests = generate_requests(with_seed(CASES[case], seed + number), token_ids)
            job = make_job(case, requests)
            for worker in workers:
                others = [other for other in workers if other is not worker]
                sample = measure(worker, others, case, number, job)
                comparison.samples.append(sample)
                report_progress(sample, rounds)
    return comparison


def with_seed(workload: Workload, seed: int) -> Workload:
    """The workload with other prompts and lengths."""
    return Workload(
        num_requests=workload.num_requests,
        input_len=workload.input_len,
        output_len=workload.output_len,
        seed=seed,
    )


def report_progress(sample: Sample, rounds: int) -> None:
    """One line on standard error."""
    print(
        f"round {sample.round + 1}/{rounds} {sample.case:15} {sample.engine:15} "
        f"{sample.tokens_per_second:8.1f} tok/s, others used {sample.background_cpus:.2f} CPUs",
        file=sys.stderr,
    )


def make_table(comparison: Comparison, workers: list[Worker], cases: list[str]) -> Table:
    """Medians with the range, and the speed of each Shoal as a multiple of each engine's."""
    table = Table("case", "engine", title="tokens per second", title_justify="left")
    shoals = [worker.name for worker in workers if PEERS[worker.name][0] == "shoal"]
    for heading in ("median", "lowest", "highest", *(f"{name} / this" for name in shoals)):
        table.add_column(heading, justify="right")
    for case in cases:
        for worker in workers:
            rates = comparison.rates(case, worker.name)
            values = (statistics.median(rates), min(rates), max(rates))
            ratios = (comparison.ratio(case, name, worker.name) for name in shoals)
            cells = (*(f"{value:.1f}" for value in values), *(f"{ratio:.2f}" for ratio in ratios))
            table.add_row(case, worker.name, *cells)
        table.add_section()
    return table


def write_json(path: Path, comparison: Comparison, workers: list[Worker]) -> None:
    """Everything that was measured, with its context."""
    content = {
        "machine": asdict(Machine.this()),
        "engines": {worker.name: asdict(worker.engine) for worker in workers},
        "background_cpus": comparison.background_cpus(),
        "samples": [asdict(sample) for sample in comparison.samples],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def print_report(comparison: Comparison, workers: list[Worker], cases: list[str]) -> None:
    """The table, what it was measured on, and what disturbed it."""
    console = Console(width=100)
    machine = Machine.this()
    console.print(f"{machine.cpu}, {machine.cpus} CPUs, {machine.memory_gib} GiB")
    console.print(", ".join(machine.instruction_sets))
    for worker in workers:
        engine = worker.engine
        settings = ", ".join(f"{name} {value}" for name, value in engine.settings.items())
        console.print(f"{worker.name}: {engine.version}, {engine.weights}, {settings}")
    console.print(make_table(comparison, workers, cases))
    console.print(f"Other processes used {comparison.background_cpus():.2f} CPUs (median).")
    if comparison.idle_cpus() > IDLE_LIMIT:
        console.print(f"Waiting engines used up to {comparison.idle_cpus():.2f} CPUs.")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares Shoal with its peers.")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=ALWAYS)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--root", type=Path, default=ROOT, help="what setup_peers.py has prepared")
    parser.add_argument("--json", type=Path, help="file for all samples")
    arguments = parser.parse_args()
    tokenizer = load_text_interface(open_model(resolve("smollm2-135m"))).tokenizer
    workers: list[Worker] = []
    try:
        workers.extend(Worker(name, arguments.root, arguments.threads) for name in arguments.peers)
        comparison = compare(
            workers,
            arguments.cases,
            arguments.rounds,
            arguments.seed,
            ordinary_token_ids(tokenizer),
        )
        if arguments.json is not None:
            write_json(arguments.json, comparison, workers)
        print_report(comparison, workers, arguments.cases)
    finally:
        for worker in workers:
            worker.close()


if __name__ == "__main__":
    main()
