"""`shoal serve` in a process of its own, for one run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.bench.errors import BenchError
from shoal.bench.runs.serve_flags import serve_flags
from shoal.config import EngineConfig

STOP_SECONDS = 60
POLL_SECONDS = 0.05


@contextmanager
def serving(config: EngineConfig, directory: Path) -> Iterator[str]:
    """A server on a free port; gives its URL when it is ready, and ends it.

    Args:
        config: the settings of its engine.
        directory: where its output goes.

    Raises:
        BenchError: it doesn't start, or doesn't end as it should; the message has its last words.
    """
    command = [sys.executable, "-m", "shoal.cli", "serve", config.model, "--port", "0"]
    command += ["--log-level", "warning", *serve_flags(config)]
    environment = {name: value for name, value in os.environ.items() if name != "SHOAL_API_KEY"}
    banner, log = directory / "stdout", directory / "stderr"
    with banner.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
    try:
        while not (url := _url_in(banner.read_text())):
            if process.poll() is not None:
                raise BenchError(f"the server didn't start: {_last_line(log)}")
            time.sleep(POLL_SECONDS)
        yield url
        process.terminate()
        if status := process.wait(STOP_SECONDS):
            raise BenchError(f"the server ended with status {status}: {_last_line(log)}")
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"the server didn't end within {STOP_SECONDS} s") from error
    finally:
        process.kill()
        process.wait()


def _url_in(banner: str) -> str:
    """Where the server listens; empty until it is ready, which the end of the banner says."""
    if not banner.endswith("ready\n"):
        return ""
    return next(line.split()[1] for line in banner.splitlines() if line.startswith("URL"))


def _last_line(log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    return lines[-1] if lines else "it said nothing"
