"""The life of the process: its port, its signals, the death of its engine."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, free_port, running, until

pytestmark = pytest.mark.e2e

LONG = {"prompt": [5], "ignore_eos": True, "stream": True, "max_tokens": 20_000}


class Stream(threading.Thread):
    """Reads a stream to its end in a thread."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._url = url
        self._body = body
        self.lines: list[str] = []
        self.start()
        until(lambda: len(self.lines) > 3 or not self.is_alive())

    def run(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/completions", json=self._body, timeout=120) as r:
            self.lines += (line for line in r.iter_lines() if line)

    @property
    def has_finished(self) -> bool:
        """Whether the stream came to its normal end."""
        return self.lines[-1] == "data: [DONE]"

    @property
    def has_error(self) -> bool:
        """Whether the stream's last event is an error."""
        return '"error"' in self.lines[-1]


def test_a_second_server_on_the_port_exits_at_once(tiny_model: Path, tmp_path: Path) -> None:
    port = str(free_port())
    with running(tmp_path / "first", str(tiny_model), "--port", port) as first:
        second = ServerProcess(tmp_path / "second", "no-such-model", "--port", port)
        assert second.process.wait(timeout=60) == 1
        # The port is the first thing that fails: the missing model has not been looked for.
        (line,) = second.stderr.splitlines()
        assert port in line
        assert "in use" in line
        assert httpx.get(f"{first.url}/ready").status_code == 200


def test_the_port_is_taken_and_health_answers_while_the_model_loads(
    tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    server = ServerProcess(tmp_path, str(tiny_model), "--port", str(port))
    statuses: set[tuple[int, int]] = set()

    def is_ready() -> bool:
        try:
            health, ready = [
                httpx.get(f"http://127.0.0.1:{port}/{path}", timeout=60).status_code
                for path in ("health", "ready")
            ]
        except httpx.ConnectError:  # the interpreter is still starting
            return False
        statuses.add((health, ready))
        return ready == 200

    try:
        until(is_ready, 120)
    finally:
        assert server.stop() == 0
    assert statuses <= {(200, 503), (200, 200)}


def test_the_banner_says_what_is_served(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(tiny_model), "--num-threads", "1") as server:
        for words in ("tiny", "continuous", "--num-threads", "blocks", server.url):
            assert words in server.stdout
        assert server.stdout.endswith("ready\n")


def test_sigterm_lets_running_streams_finish_and_refuses_new_requests(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, str(tiny_model)) as server:
        streams = [Stream(server.url, LONG | {"max_tokens": 4000}) for _ in range(5)]

        server.process.send_signal(signal.SIGTERM)

        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5]})
        assert refused.status_code == 503
        assert server.process.wait(timeout=120) == 0
        for stream in streams:
            stream.join()
        assert all(stream.has_finished for stream in streams)


def test_a_second_signal_stops_now_and_tells_the_clients(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(tiny_model)) as server:
        stream = Stream(server.url, LONG)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{server.url}/ready").status_code == 503)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(timeout=60) == 0
        stream.join()
        assert stream.has_error
        assert not stream.has_finished


def test_requests_that_outlast_the_shutdown_timeout_are_dropped(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, str(tiny_model), "--shutdown-timeout", "0.1") as server:
        stream = Stream(server.url, LONG)
        assert server.stop() == 0
        stream.join()
        assert stream.has_error


def test_when_the_engine_dies_every_stream_gets_an_error_and_ready_is_503(
    tiny_model: Path, tmp_path: Path
) -> None:
    with running(tmp_path, str(tiny_model)) as server:
        streams = [Stream(server.url, LONG) for _ in range(10)]

        os.kill(server.engine_pid(), signal.SIGKILL)

        for stream in streams:
            stream.join(timeout=30)
        assert all(stream.has_error and not stream.has_finished for stream in streams)
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/health").status_code == 503
        after = httpx.post(f"{server.url}/v1/completions", json={"prompt": [5]})
        assert after.status_code == 503
        assert after.json()["error"]["code"] == "engine_dead"


def test_the_engine_ends_with_its_server(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(tiny_model)) as server:
        pid = server.engine_pid()
        server.process.kill()
        server.process.wait()
        until(lambda: not Path(f"/proc/{pid}/exe").exists())
