"""The real server in its own process, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import exposition
import httpx

START_SECONDS = 120
POISON = 7  # a prompt with this token fails, where the tests say so
FAULTS = Path(__file__).parent / "faults"


class ServerProcess:
    """`shoal serve` on a port of its own; its output goes to files in `directory`."""

    def __init__(self, directory: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._stdout_path = directory / "stdout"
        self._stderr_path = directory / "stderr"
        with self._stdout_path.open("wb") as stdout, self._stderr_path.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shoal.cli", "serve", *arguments],
                stdout=stdout,
                stderr=stderr,
                env=os.environ | (env or {}),
            )

    @property
    def stdout(self) -> str:
        return self._stdout_path.read_text()

    @property
    def stderr(self) -> str:
        return self._stderr_path.read_text()

    @property
    def url(self) -> str:
        (line,) = [line for line in self.stdout.splitlines() if line.startswith("URL")]
        return line.split()[1]

    @property
    def port(self) -> int:
        return httpx.URL(self.url).port or 0

    def wait_until_ready(self) -> ServerProcess:
        until(lambda: self._is_ready() or self.process.poll() is not None, START_SECONDS)
        assert self.process.poll() is None, self.stderr
        return self

    def _is_ready(self) -> bool:
        return self.stdout.endswith("ready\n")

    def client(self, **settings: object) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **settings)

    def metrics(self) -> dict[str, float]:
        """The samples without labels, by name, without their prefix."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return {
            sample.name.removeprefix("shoal:"): sample.value
            for sample in exposition.samples(text)
            if not sample.labels
        }

    def metric(self, name: str, **labels: str) -> float:
        """The one sample with these labels."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return exposition.value(text, f"shoal:{name}", **labels)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits, and no KV block is held."""
        metrics = self.metrics()
        return not any(
            metrics[name]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
        )

    def engine_pid(self) -> int:
        """The process of the engine: the only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (pid,) = children.read_text().split()
        return int(pid)

    def stop(self) -> int:
        """End it as a service manager would; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@contextlib.contextmanager
def running(
    directory: Path, *arguments: str, env: dict[str, str] | None = None
) -> Iterator[ServerProcess]:
    """A server that is ready, on a free port unless the arguments say otherwise."""
    if "--port" not in arguments:
        arguments = (*arguments, "--port", "0")
    server = ServerProcess(directory, *arguments, env=env)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()


def faults(**which: object) -> dict[str, str]:
    """The environment for faults of the engine: `hold=PATH`, `poison=TOKEN_ID`; see `faults/`."""
    settings = {f"SHOAL_TEST_{name.upper()}": str(value) for name, value in which.items()}
    return {"PYTHONPATH": str(FAULTS)} | settings


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
