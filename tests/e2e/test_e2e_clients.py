"""Clients that hang up, and probes while the engine is busy."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from random import Random

import exposition
import httpx
import pytest
from server_process import ServerProcess, until
from small_pool import NUM_POOL_BLOCKS, NUM_POOL_TOKENS
from streams import COMPLETIONS, post_alone, post_and_leave_open

pytestmark = pytest.mark.e2e

BLOCK_STATES = ("used", "cached", "empty")
LONG = {"prompt": "Once upon a time", "max_tokens": 4000, "ignore_eos": True}


def test_a_hang_up_frees_the_blocks_of_an_answer_in_one_body(
    client: httpx.Client, server: ServerProcess
) -> None:
    with post_and_leave_open(server, LONG):
        until(lambda: server.metrics()["num_requests_running"] == 1)
        assert server.metrics()["kv_cache_usage_ratio"] > 0
    until(server.is_idle, 5)


def test_closing_a_stream_after_three_chunks_frees_its_blocks(
    client: httpx.Client, server: ServerProcess
) -> None:
    with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        for _ in range(6):
            next(lines)
        assert server.metrics()["num_requests_running"] == 1
    until(server.is_idle, 5)


def test_a_hang_up_while_queued_drops_the_request_before_its_prefill(
    client: httpx.Client, server: ServerProcess
) -> None:
    running = [post_and_leave_open(server, LONG) for _ in range(8)]  # all seats are taken
    try:
        until(lambda: server.metrics()["num_requests_running"] == 8)
        before = server.metrics()
        for streamed in (False, True):
            with post_and_leave_open(server, {**LONG, "stream": streamed}):
                until(lambda: server.metrics()["num_requests_waiting"] == 1)
            until(lambda: server.metrics()["num_requests_waiting"] == 0, 5)
        assert server.metrics()["num_requests_running"] == 8
    finally:
        for connection in running:
            connection.close()
    until(server.is_idle, 5)
    after = server.metrics()
    # A prompt is looked up when it starts, and counts when it has been computed.
    for name in ("prefix_cache_queries_total", "prompt_tokens_total"):
        assert after[name] == before[name]


async def test_clients_that_die_at_any_moment_leave_nothing_behind(
    small_pool_server: ServerProcess,
) -> None:
    num_tokens = 100
    random = Random(1)

    async def one_round() -> None:
        """Twelve requests for more than the pool holds; half of them hang up."""
        bodies = [
            {
                "prompt": [random.randrange(10, 100)]
                * random.randrange(NUM_POOL_TOKENS // 20, NUM_POOL_TOKENS // 6),
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "stream": random.random() < 0.5,
            }
            for _ in range(12)
        ]
        tasks = [asyncio.create_task(post_alone(small_pool_server, body)) for body in bodies]
        for dying in tasks[::2]:
            await asyncio.sleep(random.random() * 0.02)
            dying.cancel()
        for body, task in zip(bodies[1::2], tasks[1::2], strict=True):
            answer = await task
            assert answer.status_code == 200
            if not body["stream"]:
                assert answer.json()["usage"]["completion_tokens"] == num_tokens

    def num_ended(reason: str) -> float:
        return small_pool_server.metric("request_success_total", finished_reason=reason)

    num_finished, num_aborted = num_ended("length"), num_ended("abort")
    for _ in range(20):
        await one_round()
    until(small_pool_server.is_idle, 5)
    counts = [small_pool_server.metric("num_blocks", state=state) for state in BLOCK_STATES]
    assert counts[0] == 0
    assert sum(counts) == NUM_POOL_BLOCKS
    assert num_ended("length") >= num_finished + 20 * 6
    assert num_ended("abort") > num_aborted


def test_the_metrics_are_as_prometheus_wants_them_and_the_gauges_0_at_idle(
    client: httpx.Client, server: ServerProcess
) -> None:
    client.post(COMPLETIONS, json={"prompt": "Hello", "n": 2})
    client.post(COMPLETIONS, json={"prompt": "Hello", "n": 0})
    until(server.is_idle)
    text = client.get("/metrics").text
    assert exposition.problems(text) == []
    gauges = re.findall(r"^# TYPE (\S+) gauge$", text, re.MULTILINE)
    idle = {name: exposition.value(text, name) for name in gauges if name != "shoal:num_blocks"}
    assert len(idle) >= 4
    assert set(idle.values()) == {0}


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
