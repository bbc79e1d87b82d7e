"""`shoal bench serve` as it is typed, against a mock server in another thread."""

import asyncio
import json
import threading
from contextlib import contextmanager
from itertools import pairwise
from statistics import pstdev

import pytest
from mock_server import DONE, Answer, MockServer, text, tokens, usage

from shoal.bench.client import target
from shoal.bench.results.report import make_table
from shoal.cli import main


@contextmanager
def serving(script, **options):
    """A mock server; yields it when it listens."""
    server = MockServer(script, **options)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve():
        async with server:
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def command(server, *flags):
    return main(["bench", "serve", "--base-url", server.url, *" ".join(flags).split()])


def test_the_table_and_the_file_hold_the_same_figures_and_what_they_were_measured_with(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "result.json"
    with serving(lambda *_: tokens(5, 0.02, 0.01), can_reset=True) as server:
        flags = f"--num-requests 6 --input-len 3:9 --output-len 5 --api-key secret --json {path}"
        assert command(server, flags, "--request-rate 50 --slo-ttft 5 --workload-seed 4") == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["benchmark"] == "serve"
    assert result["machine"]["cpus"] >= 1
    assert result["workload"]["seed"] == 4
    assert result["workload"]["input_len"] == {"low": 3, "high": 9}
    assert result["settings"]["slo"]["ttft"] == 5.0
    assert result["settings"]["arrivals"]["request_rate"] == 50.0
    assert result["run"]["arrivals"] == "open loop, Poisson, 50 requests/s"
    assert result["run"]["model"] == "mock"
    assert result["failures"] == {}
    assert "secret" not in path.read_text() + printed
    for fact in result["run"].values():
        assert fact in printed
    figures = result["figures"]
    assert figures["requests_completed"] == 6
    assert figures["output_tokens"] == 30
    assert figures["itl_count"] == 24
    assert figures["good_share"] == 1.0
    assert 0.0 < figures["load_generator_cpu_share"] < 1.0
    names, values = (list(column.cells) for column in make_table("", figures).columns)
    for name, value in zip(names, values, strict=True):
        assert any(name in line and value in line for line in printed.splitlines())


BROKEN = Answer([(0.0, b'{"error": {"message": "broken"}}')], 503, "application/json")


def test_failures_are_told_by_kind_and_by_the_exit_status(tmp_path, capsys):
    def script(number, _request):
        return BROKEN if number % 2 else tokens(2, 0.0, 0.0)

    path = tmp_path / "result.json"
    with serving(script) as server:
        flags = f"--num-requests 4 --warm-up-requests 0 --concurrency 1 --json {path}"
        assert command(server, flags) == 1
    assert "2 x http_503; the first: broken" in capsys.readouterr().err
    result = json.loads(path.read_text())
    assert result["failures"] == {"http_503": 2}
    assert result["figures"]["requests_failed"] == 2


def test_refusals_alone_are_no_failure():
    refusal = Answer([(0.0, b"{}")], 429, "application/json")

    def script(number, _request):
        return refusal if number == 1 else tokens(2, 0.0, 0.0)

    with serving(script) as server:
        flags = "--num-requests 4 --warm-up-requests 0 --concurrency 1"
        assert command(server, flags) == 0


def test_a_trace_is_replayed_at_its_times(tmp_path):
    trace, path = tmp_path / "trace.csv", tmp_path / "result.json"
    trace.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0,5,2\n9,7,3\n11,30,4\n12,6,1\n"
    )

    def script(_number, request):
        return tokens(request.body["max_tokens"], 0.01, 0.01)

    with serving(script) as server:
        flags = f"--trace {trace} --trace-start 9 --trace-duration 3 --trace-max-input 8"
        flags += f" --time-scale 0.2 --warm-up-requests 0 --json {path}"
        assert command(server, flags) == 0
    lengths = [(len(r.body["prompt"].split()), r.body["max_tokens"]) for r in server.generations]
    assert lengths == [(7, 3), (8, 4)]
    first, second = (request.received for request in server.generations)
    assert second - first == pytest.approx(0.4, abs=0.1)
    result = json.loads(path.read_text())
    assert result["run"]["arrivals"] == "open loop, trace, time scale 0.2"
    assert result["figures"]["requests_cut"] == 1


def one_after_the_other(seconds):
    """The script of a server that takes so long for each request, and lets the others wait."""
    busy = 0.0

    def script(_number, request):
        nonlocal busy
        busy = max(busy, request.received) + seconds
        events = [(busy - request.received, text("a", "length")), (0.0, usage(4, 1) + DONE)]
        return Answer(events)

    return script


SHORT_SEARCH = "--find-capacity --input-len 4 --output-len 1 --warm-up-requests 1"
# Regular arrivals, so that nothing but the queue makes a request late.
SHORT_SEARCH += " --num-requests 3 --capacity-seconds 1 --burstiness 1e6"


def test_the_capacity_of_a_server_with_a_known_knee_is_found(tmp_path, capsys):
    """10 ms for each request: beyond 100 a second the queue grows."""
    path = tmp_path / "result.json"
    with serving(one_after_the_other(0.01)) as server:
        assert command(server, SHORT_SEARCH, f"--slo-ttft 0.15 --json {path}") == 0
    result = json.loads(path.read_text())
    capacity = result["figures"]["capacity_requests_per_second"]
    # A queue may grow for a second before a tenth of its requests wait for more than 150 ms.
    assert 60 < capacity < 130
    assert capacity < result["figures"]["too_high_requests_per_second"] <= capacity * 1.1 + 1e-9
    assert result["run"]["arrivals"] == "open loop, Gamma, burstiness 1e+06"
    assert "unloaded" not in result
    assert result["probes"][0]["request_rate"] == 1.0
    for probe in result["probes"]:
        assert probe["kept"] == (probe["good_share"] >= 0.9) == (probe["request_rate"] <= capacity)
    assert f"capacity: {capacity:.3g} requests/s" in capsys.readouterr().out


def test_a_rate_that_is_swallowed_and_not_achieved_is_not_kept(tmp_path):
    """However patient the SLO: what comes beyond 5 a second only makes the queue longer."""
    path = tmp_path / "result.json"
    answer = one_after_the_other(0.2)

    def script(number, request):
        return answer(number, request) if number < 40 else BROKEN  # lest it search for ever

    with serving(script) as server:
        flags = f"--slo-ttft 60 --capacity-precision 1 --json {path}"
        assert command(server, SHORT_SEARCH, flags) == 0
    result = json.loads(path.read_text())
    swallowed = result["probes"][-1]
    assert swallowed["request_rate"] == 8.0
    assert swallowed["good_share"] == 1.0
    assert not swallowed["kept"]
    assert swallowed["requests_per_second"] < swallowed["offered_requests_per_second"] * 2 / 3
    assert result["figures"]["capacity_requests_per_second"] == 4.0
    assert result["figures"]["too_high_requests_per_second"] == 8.0


@pytest.mark.parametrize(("burstiness", "spread"), [("", 0.5), ("--burstiness 1e6", 0.0)])
def test_the_arrivals_of_a_search_have_the_burstiness_that_was_asked_for(burstiness, spread):
    with serving(lambda *_: tokens(1, 0.0, 0.0)) as server:
        flags = f"--find-capacity --slo-ttft 1e-9 {burstiness} --warm-up-requests 0"
        flags += " --num-requests 6 --capacity-seconds 1 --input-len 4 --output-len 1"
        assert command(server, flags) == 1
    first_rate = server.generations[:6]
    gaps = [b.received - a.received for a, b in pairwise(first_rate)]
    assert pstdev(gaps) >= spread if spread else pstdev(gaps) < 0.1


def test_a_search_ends_at_once_if_no_rate_can_meet_the_slo(tmp_path, capsys):
    path = tmp_path / "result.json"
    with serving(lambda *_: tokens(2, 0.05, 0.03)) as server:
        flags = "--find-capacity --slo-ttft 0.02 --slo-tpot 1 --input-len 4 --output-len 2"
        flags += " --num-requests 3 --capacity-seconds 1 --warm-up-requests 1"
        assert command(server, flags, f"--json {path}") == 1
        assert len(server.generations) == 1 + 3 + 1 + 3  # at 1 a second, and one at a time
    result = json.loads(path.read_text())
    assert [probe["request_rate"] for probe in result["probes"]] == [1.0]
    assert result["figures"]["capacity_requests_per_second"] == 0.0
    assert result["unloaded"]["ttft_p50_ms"] == pytest.approx(50, abs=20)
    (verdict,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("capacity: ")
    ]
    assert "isn't met without any load" in verdict
    assert f"ttft p50 {result['unloaded']['ttft_p50_ms']:.4g} ms" in verdict


def test_a_file_that_cannot_be_written_is_told_before_anything_is_sent(tmp_path, capsys):
    path = tmp_path / "nowhere" / "result.json"
    with serving(lambda *_: tokens(2, 0.0, 0.0)) as server:
        assert command(server, f"--concurrency 1 --json {path}") == 2
        assert server.requests == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"shoal: json {path} can't be written: ")


def test_a_run_that_fails_leaves_the_old_result_alone(tmp_path):
    path = tmp_path / "result.json"
    for content in (None, "old"):
        if content is not None:
            path.write_text(content)
        flags = f"bench serve --base-url http://127.0.0.1:1 --concurrency 1 --json {path}"
        assert main(flags.split()) == 1
        assert (path.read_text() if path.exists() else None) == content


@pytest.mark.parametrize("silent", ["/v1/models", "/tokenize", "/reset_prefix_cache"])
def test_a_server_that_takes_requests_and_never_answers_is_given_up(silent, capsys, monkeypatch):
    monkeypatch.setattr(target, "MAX_ANSWER_SECONDS", 0.2)
    with serving(lambda *_: tokens(2, 0.0, 0.0), silent=silent) as server:
        assert command(server, "--concurrency 1 --num-requests 1 --warm-up-requests 0") == 1
        assert [request.path for request in server.requests][-1] == silent
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"shoal: {server.url}{silent} gave no complete answer within 0.2 s"


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("", "request_rate"),
        ("--request-rate 1 --concurrency 2", "contradicts"),
        ("--concurrency 2 --burstiness 2", "contradicts"),
        ("--concurrency 2 --think-time -1", "think_time"),
        ("--request-rate 1 --think-time 1", "think_time"),
        ("--request-rate 1 --trace t --time-scale 2", "time_scale"),
        ("--trace t --input-len 4", "input_len"),
        ("--request-rate 1 --dataset d --input-len 4", "input_len"),
        ("--request-rate 1 --trace-start 4", "trace_start"),
        ("--find-capacity", "slo_ttft"),
        ("--find-capacity --slo-ttft 1 --request-rate 1", "request_rate"),
        ("--request-rate 1 --slo-share 0.5", "slo_share"),
        ("--request-rate 1 --slo-ttft 0", "slo_ttft"),
        ("--request-rate 1 --endpoint chat --prompt-form tokens", "prompt_form"),
        ("--request-rate 1 --output-len exp:9", "--output-len"),
        ("--request-rate 1 --request-timeout 0", "request_timeout"),
        ("--request-rate 1 --warm-up-requests -1", "warm_up_requests"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_before_anything_is_sent(flags, named, capsys):
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:1", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shoal: ")
    assert named in error


def test_a_server_that_is_not_there_is_told_in_one_line(capsys):
    flags = "bench serve --base-url http://127.0.0.1:1 --concurrency 1"
    assert main(flags.split()) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("shoal: 127.0.0.1:1 can't be reached")
