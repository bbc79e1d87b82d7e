"""The figures of a run against a server whose every delay is known, over real sockets.

The mock and the load generator share an event loop and a clock; what is expected is computed from
the times at which the mock really sent, so that a busy machine doesn't blur the comparison.
"""

import time
from itertools import pairwise
from statistics import mean, median

import pytest
from mock_server import DONE, Answer, MockServer, delta, text, tokens, usage

from shoal.bench.client.connection import HttpClient
from shoal.bench.client.load import run_load
from shoal.bench.client.target import TargetConfig, connect
from shoal.bench.results.measure import Slo
from shoal.bench.runs.served import Plan, PreparationConfig, run_once
from shoal.bench.workloads.arrivals import ArrivalConfig, ClosedLoop, OpenLoop
from shoal.bench.workloads.lengths import LengthRange
from shoal.bench.workloads.workload import Workload, WorkloadRequest


def equals(expected):
    """Within 2 ms or 1 %."""
    return pytest.approx(expected, abs=2e-3, rel=0.01)


def plan(num_requests=8, *, warm_up=0, slo=None, reuse_prompts=False, output_len=20, **arrivals):
    return Plan(
        workload=Workload(
            num_requests=num_requests,
            input_len=LengthRange(4, 40),
            output_len=LengthRange(output_len, output_len),
        ),
        arrivals=ArrivalConfig(**(arrivals or {"concurrency": 2})),
        slo=slo or Slo(),
        preparation=PreparationConfig(warm_up_requests=warm_up, reuse_prompts=reuse_prompts),
    )


async def run_on(server, plan, **target):
    async with HttpClient(server.url) as client:
        config = TargetConfig(base_url=server.url, **target)
        return await run_once(await connect(client, config), plan)


def due_times(run):
    """When the requests were due, in the order of sending."""
    return sorted(record.scheduled for record in run.load.records)


async def test_all_figures_equal_what_the_server_did():
    def script(number, _request):
        return tokens(6 + number, first=0.1 + 0.03 * number, gap=0.02 + 0.002 * number)

    slo = Slo(ttft=0.235, tpot=0.029)  # on a quiet machine requests 0 to 4 meet both
    async with MockServer(script) as server:
        run = await run_on(server, plan(8, slo=slo, request_rate=20, burstiness=1e6))

    scheduled = due_times(run)
    ttfts, itls, tpots, e2es = [], [], [], []
    for due, request in zip(scheduled, server.generations, strict=True):
        *times, _usage = request.sent
        gaps = [later - earlier for earlier, later in pairwise(times)]
        ttfts.append(times[0] - due)
        e2es.append(times[-1] - due)
        itls += gaps
        tpots.append(mean(gaps))
    duration = max(request.sent[-2] for request in server.generations) - scheduled[0]
    num_tokens = sum(6 + number for number in range(8))

    measured = run.measurement
    assert measured.num_completed == 8
    assert measured.num_output_tokens == num_tokens
    assert measured.num_itls == num_tokens - 8
    assert measured.duration == equals(duration)
    assert measured.ttft.mean == equals(mean(ttfts))
    assert measured.ttft.p50 == equals(median(ttfts))
    assert measured.itl.mean == equals(mean(itls))
    assert measured.itl.p50 == equals(median(itls))
    assert measured.tpot.mean == equals(mean(tpots))
    assert measured.tpot.p50 == equals(median(tpots))
    assert measured.e2e.mean == equals(mean(e2es))
    assert measured.e2e.max == equals(max(e2es))
    assert measured.output_tokens_per_second == pytest.approx(num_tokens / duration, rel=0.01)
    good, doubtful = 0, 0
    for ttft, tpot in zip(ttfts, tpots, strict=True):
        excess = max(ttft - slo.ttft, tpot - slo.tpot)
        good += excess < -0.002
        doubtful += abs(excess) <= 0.002
    assert good <= measured.num_good <= good + doubtful
    assert measured.goodput == pytest.approx(measured.num_good / duration, rel=0.01)
    assert measured.good_share == measured.num_good / 8


async def test_the_time_to_the_first_token_is_not_among_the_gaps():
    async with MockServer(lambda *_: tokens(10, first=0.3, gap=0.02)) as server:
        run = await run_on(server, plan(2))
    assert run.measurement.num_itls == 2 * 9
    assert run.measurement.itl.max < 0.15
    firsts = [request.sent[0] for request in server.generations]
    assert run.measurement.ttft.mean == equals(mean(firsts) - mean(due_times(run)))


async def test_neither_the_role_nor_an_empty_chunk_is_the_first_token():
    events = [
        (0.05, delta(role="assistant", content="")),
        (0.05, delta(content="")),
        (0.2, delta(content="Hello")),
        (0.02, delta(content=" you", finish_reason="length")),
        (0.0, usage(7, 2) + DONE),
    ]
    async with MockServer(lambda *_: Answer(events)) as server:
        run = await run_on(server, plan(2), endpoint="chat")
    firsts = [request.sent[2] for request in server.generations]
    assert run.measurement.ttft.mean == equals(mean(firsts) - mean(due_times(run)))
    assert run.measurement.num_itls == 2
    assert server.generations[0].path == "/v1/chat/completions"


async def test_reasoning_is_text_too():
    events = [
        (0.05, delta(reasoning_content="Hm")),
        (0.1, delta(content="Yes", finish_reason="stop")),
        (0.0, usage(7, 2) + DONE),
    ]
    async with MockServer(lambda *_: Answer(events)) as server:
        run = await run_on(server, plan(1), endpoint="chat")
    assert run.measurement.ttft.mean == equals(server.generations[0].sent[0] - due_times(run)[0])


async def test_tokens_are_those_of_the_usage_not_chunks_nor_what_the_text_looks_like():
    spaces = [(0.1, text(" ")), (0.28, text(" " * 14, "length")), (0.0, usage(5, 15) + DONE)]
    async with MockServer(lambda *_: Answer(spaces)) as server:
        run = await run_on(server, plan(1))
    assert run.measurement.num_output_tokens == 15
    assert run.measurement.num_tokens_without_own_chunk == 13
    first, last, _usage = server.generations[0].sent
    assert run.measurement.tpot.mean == equals((last - first) / 14)
    assert run.measurement.num_input_tokens == 5


async def test_without_usage_the_chunks_are_counted_and_it_is_said():
    answer = Answer([(0.0, text("a")), (0.01, text("b", "stop")), (0.0, DONE)])
    async with MockServer(lambda *_: answer) as server:
        run = await run_on(server, plan(3))
    assert run.measurement.num_output_tokens == 6
    assert run.figures["requests_without_usage"] == 3


async def test_a_token_without_text_at_the_end_comes_with_the_finish_reason():
    events = [(0.05, text("a")), (0.2, text("", "length")), (0.0, usage(5, 2) + DONE)]
    async with MockServer(lambda *_: Answer(events)) as server:
        run = await run_on(server, plan(1))
    assert run.measurement.e2e.mean == equals(server.generations[0].sent[1] - due_times(run)[0])


FAILURES = {
    "empty": Answer([(0.0, text("", "stop")), (0.0, usage(5, 0) + DONE)]),
    "no_finish": Answer([(0.0, text("a")), (0.0, DONE)]),
    "finish_error": Answer([(0.0, text("a")), (0.0, text("", "error")), (0.0, usage(5, 1) + DONE)]),
    "finish_abort": Answer([(0.0, text("a", "abort")), (0.0, usage(5, 1) + DONE)]),
    "error_event": Answer([(0.0, text("a")), (0.0, b'data: {"error": {"message": "no"}}\n\n')]),
    "disconnected": Answer([(0.0, text("a"))], hang_up=True),
    "http_500": Answer([(0.0, b'{"error": {"message": "broken"}}')], 500, "application/json"),
    "not_streamed": Answer([(0.0, b'{"choices": []}')], 200, "application/json"),
    "timeout": Answer([(0.0, text("a")), (30.0, text("b", "stop"))]),
}


@pytest.mark.parametrize("kind", FAILURES)
async def test_a_failure_is_told_by_its_kind_and_is_in_no_other_figure(kind):
    good = tokens(3, first=0.05, gap=0.01)

    def script(number, _request):
        return FAILURES[kind] if number % 2 else good

    async with MockServer(script) as server:
        run = await run_on(server, plan(6, concurrency=1, slo=Slo(e2e=9.0)), request_timeout=0.4)
    assert run.load.failures_by_kind == {kind: 3}
    assert run.measurement.num_completed == run.num_failed == 3
    assert run.measurement.num_output_tokens == 9
    assert run.measurement.good_share == 0.5
    assert min(timeline.ttft for timeline in run.load.timelines) >= 0.05


async def test_a_refusal_is_counted_apart_from_failures():
    refusal = Answer([(0.0, b'{"error": {"message": "queue full"}}')], 429, "application/json")

    def script(number, _request):
        return refusal if number < 2 else tokens(2, 0.01, 0.01)

    async with MockServer(script) as server:
        run = await run_on(server, plan(6, slo=Slo(ttft=9.0)))
    assert (run.measurement.num_completed, run.num_failed) == (4, 0)
    assert run.figures["requests_refused"] == 2
    assert run.measurement.good_share == 4 / 6
    assert {failure.message for failure in run.load.failures} == {"queue full"}


async def test_a_run_in_which_everything_fails_has_counts_and_no_times():
    async with MockServer(lambda *_: FAILURES["no_finish"]) as server:
        run = await run_on(server, plan(3))
    assert run.measurement is None
    assert run.figures["requests_failed"] == 3
    assert "ttft_mean_ms" not in run.figures


async def test_the_time_of_a_request_counts_from_when_it_was_due():
    """All five are due at once; a server that answers one after the other makes four wait."""
    busy = 0.0

    def script(_number, request):
        nonlocal busy
        busy = max(busy, request.received) + 0.1
        return tokens(1, first=busy - request.received, gap=0.0)

    async with MockServer(script) as server:
        run = await run_on(server, plan(5, request_rate=float("inf"), output_len=1))
    (due,) = {record.scheduled for record in run.load.records}
    ttfts = sorted(timeline.ttft for timeline in run.load.timelines)
    assert ttfts == [equals(request.sent[0] - due) for request in server.generations]
    assert ttfts[-1] >= 0.5
    assert run.measurement.tpot is None


async def send_three(arrivals, on_end):
    """Three requests to a server that answers at once."""
    async with (
        MockServer(lambda *_: tokens(2, 0.0, 0.0)) as server,
        HttpClient(server.url) as client,
    ):
        target = await connect(client, TargetConfig(base_url=server.url))
        return await run_load(target, [WorkloadRequest("a", 2)] * 3, arrivals, on_end=on_end)


async def test_what_the_load_generator_itself_delays_is_part_of_the_times():
    # The end of each request keeps the event loop busy when the next is due.
    arrivals = OpenLoop((0.0, 0.05, 0.1), "three")
    run = await send_three(arrivals, on_end=lambda *_: time.sleep(0.2))
    late = run.records[-1]
    assert late.sent - late.scheduled > 0.05
    assert late.result.sent == late.scheduled
    assert max(run.send_delays) >= late.sent - late.scheduled
    assert late.result.ttft > late.sent - late.scheduled


async def test_the_end_of_each_request_is_told():
    told = []
    await send_three(ClosedLoop(1), on_end=lambda *counts: told.append(counts))
    assert told == [(1, 3), (2, 3), (3, 3)]
