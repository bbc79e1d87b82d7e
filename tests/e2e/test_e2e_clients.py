"""Clients that hang up, and probes while the engine is busy."""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, until

pytestmark = pytest.mark.e2e

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}


def post_and_leave_open(server: ServerProcess, body: dict[str, Any]) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port))
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def test_a_hang_up_frees_the_blocks_of_an_answer_in_one_body(
    client: httpx.Client, server: ServerProcess
) -> None:
    with post_and_leave_open(server, LONG):
        until(lambda: server.metrics()["shoal:num_requests_running"] == 1)
        assert server.metrics()["shoal:kv_cache_usage_ratio"] > 0
    until(server.is_idle, 5)


def test_closing_a_stream_after_three_chunks_frees_its_blocks(
    client: httpx.Client, server: ServerProcess
) -> None:
    with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert server.metrics()["shoal:num_requests_running"] == 1
    until(server.is_idle, 5)


def test_a_hang_up_while_queued_drops_the_request(
    client: httpx.Client, server: ServerProcess
) -> None:
    running = [post_and_leave_open(server, LONG) for _ in range(8)]  # all seats are taken
    try:
        until(lambda: server.metrics()["shoal:num_requests_running"] == 8)
        for streamed in (False, True):
            with post_and_leave_open(server, {**LONG, "stream": streamed}):
                until(lambda: server.metrics()["shoal:num_requests_waiting"] == 1)
            until(lambda: server.metrics()["shoal:num_requests_waiting"] == 0, 5)
        assert server.metrics()["shoal:num_requests_running"] == 8
    finally:
        for connection in running:
            connection.close()
    until(server.is_idle, 5)


def test_the_server_answers_probes_during_a_long_prefill(
    client: httpx.Client, server: ServerProcess
) -> None:
    body = {"prompt": [500] * 1500, "max_tokens": 1}
    answers: list[httpx.Response] = []
    prefill = threading.Thread(target=lambda: answers.append(client.post(COMPLETIONS, json=body)))
    prefill.start()
    num_probes = 0
    with server.client() as prober:
        while prefill.is_alive():
            assert prober.get("/health").status_code == 200
            num_probes += 1
            time.sleep(0.02)
    assert answers[0].status_code == 200
    assert num_probes > 3
