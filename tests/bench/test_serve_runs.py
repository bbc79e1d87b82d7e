"""What a run does around its figures: warm-up, prompts that no cache has seen, both loops."""

import time

import pytest
from mock_server import DONE, Answer, MockServer, text, tokens, usage
from test_serve_figures import due_times, plan, run_on

from shoal.bench.client import connection
from shoal.bench.client.connection import HttpClient
from shoal.bench.client.target import TargetConfig, connect
from shoal.bench.errors import BenchError
from shoal.bench.workloads.prompts import WORDS


class CachingScript:
    """Answers at once if it has seen the prompt, and tells so in its usage."""

    def __init__(self):
        self.seen = set()
        self.prompts = []
        self.lengths = []

    def __call__(self, _number, request):
        prompt = request.body["prompt"]
        num_input, num_output = len(prompt.split()), request.body["max_tokens"]
        cached = num_input if prompt in self.seen else 0
        self.seen.add(prompt)
        self.prompts.append(prompt)
        self.lengths.append((num_input, num_output))
        end = usage(num_input, num_output, cached) + DONE
        return Answer([(0.0, text("a")), (0.0, text("b", "length")), (0.0, end)])


async def test_the_same_seed_again_sends_the_same_lengths_and_other_prompts():
    script = CachingScript()
    async with MockServer(script) as server:
        runs = [await run_on(server, plan(6, concurrency=1)) for _ in range(2)]
    assert script.lengths[:6] == script.lengths[6:]
    assert len(set(script.prompts)) == 12
    for run in runs:
        assert run.measurement.prefix_cache_hit_rate == 0.0
        assert run.prefix_cache.startswith("cold: fresh prompts")


async def test_reused_prompts_hit_the_cache_and_the_label_says_warm():
    script = CachingScript()
    async with MockServer(script, can_reset=True) as server:
        runs = [await run_on(server, plan(6, reuse_prompts=True)) for _ in range(2)]
    assert [run.measurement.prefix_cache_hit_rate for run in runs] == [0.0, 1.0]
    assert runs[1].prefix_cache.startswith("warm")
    assert "/reset_prefix_cache" not in [request.path for request in server.requests]


async def test_no_hit_rate_is_told_where_the_server_tells_none():
    async with MockServer(lambda *_: tokens(2, 0.0, 0.0)) as server:
        run = await run_on(server, plan(2))
    assert run.measurement.prefix_cache_hit_rate is None
    assert "prefix_cache_hit_rate" not in run.figures


async def test_the_warm_up_is_in_no_figure_and_the_cache_is_reset_after_it():
    def script(number, _request):
        return tokens(3, first=0.4 if number < 3 else 0.02, gap=0.01)

    async with MockServer(script, can_reset=True) as server:
        run = await run_on(server, plan(5, warm_up=3))
    paths = [r.path for r in server.requests if r.path not in {"/v1/models", "/tokenize"}]
    assert paths == ["/v1/completions"] * 3 + ["/reset_prefix_cache"] + ["/v1/completions"] * 5
    assert run.measurement.num_completed == 5
    assert run.measurement.ttft.max < 0.2
    assert run.measurement.duration < 0.4
    assert run.prefix_cache == "cold: fresh prompts, cache reset after the warm-up"


async def test_a_server_that_cannot_reset_its_cache_is_fine_and_it_is_said():
    async with MockServer(lambda *_: tokens(2, 0.0, 0.0)) as server:
        run = await run_on(server, plan(2, warm_up=1))
    assert "the server has no /reset_prefix_cache" in run.prefix_cache


async def test_a_warm_up_that_fails_altogether_ends_the_run_with_its_reason():
    refusal = Answer([(0.0, b'{"error": {"message": "no such model"}}')], 404)
    async with MockServer(lambda *_: refusal) as server:
        with pytest.raises(BenchError, match="http_404, no such model"):
            await run_on(server, plan(2, warm_up=2))


async def test_users_who_think_are_fewer_in_flight_than_there_are_users():
    async with MockServer(lambda *_: tokens(2, first=0.04, gap=0.01)) as server:
        run = await run_on(server, plan(60, concurrency=10, think_time=0.2))
    assert run.arrivals.description == "closed loop, concurrency 10, 0.2 s think time"
    assert "offered_requests_per_second" not in run.figures
    # Each is in flight 50 of every 250 ms: two of ten, not ten.
    assert 1.0 < run.figures["requests_in_flight_mean"] < 4.0


async def test_users_who_do_not_think_are_all_in_flight():
    async with MockServer(lambda *_: tokens(2, first=0.09, gap=0.01)) as server:
        run = await run_on(server, plan(24, concurrency=4))
    assert run.figures["requests_in_flight_mean"] == pytest.approx(4, rel=0.1)
    assert run.figures["requests_in_flight_max"] == 4


async def test_an_open_loop_does_not_wait_and_tells_offered_and_achieved_rate():
    async with MockServer(lambda *_: tokens(1, first=0.5, gap=0.0)) as server:
        run = await run_on(server, plan(20, request_rate=100, burstiness=1e6))
    figures = run.figures
    assert run.arrivals.description == "open loop, Gamma, burstiness 1e+06, 100 requests/s"
    assert figures["offered_requests_per_second"] == pytest.approx(100, rel=0.01)
    assert figures["requests_in_flight_max"] == 20
    span = server.generations[-1].sent[0] - min(r.scheduled for r in run.load.records)
    assert figures["requests_per_second"] == pytest.approx(20 / span, rel=0.01)
    assert server.generations[-1].received < server.generations[0].sent[0]


@pytest.fixture
def opened(monkeypatch):
    """When the connections of the load generator were open."""
    times = []
    open_wire = connection.open_wire

    async def noting(*arguments):
        wire = await open_wire(*arguments)
        times.append(time.monotonic())
        return wire

    monkeypatch.setattr(connection, "open_wire", noting)
    return times


@pytest.mark.parametrize("arrivals", [{"concurrency": 5}, {"request_rate": float("inf")}])
async def test_connections_are_open_before_the_first_requests_are_sent(opened, arrivals):
    async with MockServer(lambda *_: tokens(2, 0.1, 0.0)) as server:
        run = await run_on(server, plan(5, **arrivals))
    assert len(opened) == 5
    assert max(opened) < min(due_times(run))


async def test_a_connection_is_open_before_a_later_request_is_due(opened):
    async with MockServer(lambda *_: tokens(2, 1.0, 0.0)) as server:
        run = await run_on(server, plan(3, request_rate=2, burstiness=1e6))
    assert len(opened) == 3
    for at, due in zip(opened[1:], due_times(run)[1:], strict=True):
        assert due - 0.4 < at < due - 0.02


async def test_connections_are_used_again():
    async with MockServer(lambda *_: tokens(2, 0.0, 0.0)) as server:
        await run_on(server, plan(20, concurrency=2))
        assert len(server.connections) == 2


async def test_answers_may_be_shorter_than_asked_if_the_end_of_sequence_counts():
    async with MockServer(lambda *_: tokens(2, 0.0, 0.0)) as server:
        await run_on(server, plan(1), ignore_eos=False)
        await run_on(server, plan(1))
    short, exact = (request.body for request in server.generations)
    assert "ignore_eos" not in short
    assert exact["ignore_eos"] is True
    assert exact["max_tokens"] == 20
    assert exact["stream_options"] == {"include_usage": True}
    assert exact["temperature"] == 0


@pytest.mark.parametrize("words_field", ["prompt", "content"])
async def test_prompts_are_token_ids_if_the_server_tells_some(words_field):
    async with MockServer(
        lambda *_: tokens(2, 0.0, 0.0),
        tokenize=lambda body: range(7) if words_field in body else [],
    ) as server:
        await run_on(server, plan(2, warm_up=0))
    for request in server.generations:
        assert set(request.body["prompt"]) <= set(range(7))
        assert 4 <= len(request.body["prompt"]) <= 40


async def test_prompts_are_text_of_common_words_if_the_server_tells_no_token_ids():
    async with MockServer(lambda *_: tokens(2, 0.0, 0.0)) as server:
        await run_on(server, plan(2))
    for request in server.generations:
        words = request.body["prompt"].split(" ")
        assert set(words) <= set(WORDS)
        assert 4 <= len(words) <= 40


async def test_token_ids_that_are_wanted_and_not_to_be_had_are_an_error():
    async with MockServer(lambda *_: tokens(2, 0.0, 0.0)) as server, HttpClient(server.url) as c:
        with pytest.raises(BenchError, match="needs a /tokenize"):
            await connect(c, TargetConfig(base_url=server.url, prompt_form="tokens"))
