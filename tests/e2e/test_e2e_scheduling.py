"""Who runs when, seen from outside: long prompts, priorities, limits, steps that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from server_process import POISON, ServerProcess, until
from streams import COMPLETIONS, Stream, at_once, post_alone, post_and_leave_open

pytestmark = pytest.mark.e2e

STEP_TOKENS, SEATS, PLACES = 16, 8, 100  # of the server with small steps
ENDLESS = {"prompt": [5], "max_tokens": 30_000, "ignore_eos": True}


def complete(server: ServerProcess, **body: Any) -> httpx.Response:
    with server.client() as client:
        return client.post(COMPLETIONS, json={"prompt": [5], "ignore_eos": True, **body})


@pytest.fixture
def small_steps(small_step_server: ServerProcess) -> Iterator[ServerProcess]:
    yield small_step_server
    until(small_step_server.is_idle)


@pytest.fixture
def one_seat(one_seat_server: ServerProcess) -> Iterator[ServerProcess]:
    yield one_seat_server
    until(one_seat_server.is_idle)


def test_a_long_prompt_never_takes_a_step_from_a_running_stream(
    small_steps: ServerProcess,
) -> None:
    before = small_steps.metrics()
    num_tokens = 3000
    stream = Stream(small_steps.url, {**ENDLESS, "max_tokens": num_tokens})
    long = complete(small_steps, prompt=[9] * 30 * STEP_TOKENS, max_tokens=1)
    assert long.status_code == 200
    assert not stream.has_ended  # it had company
    stream.join()

    after = small_steps.metrics()
    # It got a token in every step, so there were as many steps as tokens, none above the budget.
    num_steps = after["iteration_tokens_count"] - before["iteration_tokens_count"]
    assert num_steps == stream.events[-1]["usage"]["completion_tokens"] == num_tokens
    within = small_steps.metric("iteration_tokens_bucket", le=f"{STEP_TOKENS}.0")
    assert within == after["iteration_tokens_count"]


def test_short_prompts_do_not_wait_for_a_long_one(small_steps: ServerProcess) -> None:
    long = Stream(small_steps.url, {"prompt": [9] * 8000, "max_tokens": 1}, num_events=0)
    until(lambda: small_steps.metrics()["num_requests_running"] == 1)
    short = partial(complete, small_steps, prompt=[5] * 10, max_tokens=5)
    answers = at_once([short] * 3)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert not long.lines  # its prompt is still being computed
    long.join()
    assert long.has_finished


async def test_a_full_queue_refuses_at_once_and_what_it_took_finishes(
    small_steps: ServerProcess,
) -> None:
    refused_before = small_steps.metric("requests_refused_total", reason="queue_full")
    seats = [post_and_leave_open(small_steps, ENDLESS) for _ in range(SEATS)]
    until(lambda: small_steps.metrics()["num_requests_running"] == SEATS)
    body = {"prompt": [5], "max_tokens": 20, "ignore_eos": True}
    queued = [asyncio.create_task(post_alone(small_steps, body)) for _ in range(PLACES)]
    while small_steps.metrics()["num_requests_waiting"] < PLACES:
        await asyncio.sleep(0.02)

    late = range(500 - SEATS - PLACES)
    refused = await asyncio.gather(*(post_alone(small_steps, body) for _ in late))
    # Nobody has left in the meantime: nobody waited for the refusal.
    assert small_steps.metrics()["num_requests_waiting"] == PLACES
    assert not any(task.done() for task in queued)
    for connection in seats:
        connection.close()
    answers = await asyncio.gather(*queued)

    assert {answer.status_code for answer in refused} == {429}
    assert {answer.json()["error"]["code"] for answer in refused} == {"queue_full"}
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {20}
    counted = small_steps.metric("requests_refused_total", reason="queue_full") - refused_before
    assert counted == len(refused)


def test_a_higher_priority_takes_the_seat_and_the_victims_answer_is_unchanged(
    one_seat: ServerProcess,
) -> None:
    body = {"prompt": [5, 6], "max_tokens": 3000, "ignore_eos": True, "seed": 1, "priority": 10}
    alone = Stream(one_seat.url, body)
    alone.join()
    before = one_seat.metrics()["num_preemptions_total"]

    victim = Stream(one_seat.url, body)
    urgent = complete(one_seat, prompt=[9], max_tokens=5, priority=-10)
    assert urgent.status_code == 200
    assert not victim.has_ended
    victim.join()

    assert one_seat.metrics()["num_preemptions_total"] == before + 1
    assert victim.events[-1]["metrics"]["num_preemptions"] == 1
    assert urgent.json()["metrics"]["num_preemptions"] == 0
    assert victim.has_finished
    assert victim.text == alone.text


def test_a_smaller_priority_is_sooner_and_ties_go_by_arrival(one_seat: ServerProcess) -> None:
    blocker = post_and_leave_open(one_seat, {**ENDLESS, "priority": -1000})
    until(lambda: one_seat.metrics()["num_requests_running"] == 1)
    streams = []
    for priority in (5, 1, 5):
        body = {"prompt": [5], "max_tokens": 200, "ignore_eos": True, "priority": priority}
        streams.append(Stream(one_seat.url, body, num_events=0))
        num_waiting = len(streams)
        until(lambda n=num_waiting: one_seat.metrics()["num_requests_waiting"] == n)
    blocker.close()
    first, second, third = streams[1], streams[0], streams[2]
    first.join()
    assert not second.has_ended
    second.join()
    assert not third.has_ended
    third.join()
    assert all(stream.has_finished for stream in streams)


@pytest.mark.parametrize("name", ["max_queue_time", "max_total_time"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_time_limit_before_the_first_token_is_429(
    one_seat: ServerProcess, name: str, streamed: bool
) -> None:
    before = one_seat.metric("requests_refused_total", reason="time_limit")
    with post_and_leave_open(one_seat, ENDLESS):
        until(lambda: one_seat.metrics()["num_requests_running"] == 1)
        late = complete(one_seat, **{name: 0.2, "stream": streamed})
        assert one_seat.metrics()["num_requests_running"] == 1
    assert late.status_code == 429
    assert int(late.headers["retry-after"]) >= 1
    error = late.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "time_limit")
    assert f"{name} of 0.2 s" in error["message"]
    assert one_seat.metric("requests_refused_total", reason="time_limit") == before + 1


def test_a_stream_ends_at_its_total_time_with_what_it_has(one_seat: ServerProcess) -> None:
    stream = Stream(one_seat.url, {**ENDLESS, "max_total_time": 1.0})
    stream.join()
    assert stream.has_finished
    last = stream.choices[-1]
    assert (last["finish_reason"], last["stop_reason"]) == ("length", "max_total_time")
    assert 1 < stream.events[-1]["usage"]["completion_tokens"] < 30_000


def test_a_step_that_fails_is_500_for_its_requests_alone(one_seat: ServerProcess) -> None:
    errors = one_seat.metric("request_success_total", finished_reason="error")
    good = partial(complete, one_seat, max_tokens=50)
    poisoned = partial(complete, one_seat, prompt=[5, POISON])
    streamed = partial(complete, one_seat, prompt=[5, POISON], stream=True)
    answers = at_once([good, poisoned, good, streamed, good])
    assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
    assert answers[1].json()["error"]["code"] == "request_failed"
    assert one_seat.metric("request_success_total", finished_reason="error") == errors + 2
    assert httpx.get(f"{one_seat.url}/health").status_code == 200
