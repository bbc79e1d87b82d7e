"""The life of the process: its port, its signals, the death of its engine."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from server_process import POISON, ServerProcess, faults, free_port, running, until
from streams import Stream, at_once

pytestmark = pytest.mark.e2e

LONG = {"prompt": [5], "ignore_eos": True, "max_tokens": 20_000}


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


def test_the_port_is_taken_and_probes_answer_while_the_model_loads(
    tiny_model: Path, tmp_path: Path
) -> None:
    port, may_load = free_port(), tmp_path / "may_load"
    server = ServerProcess(
        tmp_path / "server", str(tiny_model), "--port", str(port), env=faults(hold=may_load)
    )

    def status(path: str) -> int | None:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=60).status_code
        except httpx.ConnectError:  # the interpreter is still starting
            return None

    try:
        until(lambda: status("/health") is not None, 120)
        assert [status(path) for path in ("/health", "/ready", "/v1/models")] == [200, 503, 200]
        url = f"http://127.0.0.1:{port}/v1/completions"
        refused = httpx.post(url, json={"prompt": [5]}, timeout=60)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_loading"
        assert "retry-after" in refused.headers

        may_load.touch()
        until(lambda: status("/ready") == 200, 120)
        assert httpx.post(url, json={"prompt": [5]}, timeout=60).status_code == 200
    finally:
        may_load.touch()
        assert server.stop() == 0


def test_the_banner_says_what_is_served(tiny_model: Path, tmp_path: Path) -> None:
    flags = ("--num-threads", "1", "--instruction-set", "portable")
    with running(tmp_path, str(tiny_model), *flags) as server:
        for words in ("tiny", "continuous", "--num-threads", "portable", "blocks", server.url):
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


def test_sigterm_starts_a_batch_that_would_not_have_filled_for_years(
    tiny_model: Path, tmp_path: Path
) -> None:
    settings = ("--scheduler", "static", "--max-queue-delay", "1e9")
    with running(tmp_path, str(tiny_model), *settings) as server, ThreadPoolExecutor() as pool:
        body = {"prompt": [5], "max_tokens": 2}
        answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        until(lambda: server.metrics()["num_requests_waiting"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result().status_code == 200
        assert server.process.wait(timeout=60) == 0


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


def test_steps_that_fail_in_a_row_end_the_engine_and_nobody_hangs(
    tiny_model: Path, tmp_path: Path
) -> None:
    arguments = (str(tiny_model), "--max-num-seqs", "1")
    with running(tmp_path, *arguments, env=faults(poison=POISON)) as server, server.client() as api:
        post = partial(api.post, "/v1/completions", json={"prompt": [5, POISON]})
        answers = at_once([post] * 6)
        assert sorted(answer.status_code for answer in answers) == [500, 500, 503, 503, 503, 503]
        assert {a.json()["error"]["code"] for a in answers} == {"request_failed", "engine_dead"}
        assert [api.get(path).status_code for path in ("/health", "/ready")] == [503, 503]
        assert post().json()["error"]["code"] == "engine_dead"


def test_the_engine_ends_with_its_server(tiny_model: Path, tmp_path: Path) -> None:
    with running(tmp_path, str(tiny_model)) as server:
        pid = server.engine_pid()
        server.process.kill()
        server.process.wait()
        until(lambda: not Path(f"/proc/{pid}/exe").exists())
