"""`shoal bench serve` as it is typed, against a mock server in another thread."""

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from mock_server import DONE, Answer, MockServer, text, tokens, usage

from shoal.bench.report import make_table
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


def test_failures_are_told_by_kind_and_by_the_exit_status(tmp_path, capsys):
    broken = Answer([(0.0, b'{"error": {"message": "broken"}}')], 503, "application/json")

    def script(number, _request):
        return broken if number % 2 else tokens(2, 0.0, 0.0)

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


def test_the_capacity_of_a_server_with_a_known_knee_is_found(tmp_path, capsys):
    """One request after the other, 10 ms each: beyond 100 a second the queue grows."""
    busy = 0.0

    def script(_number, request):
        nonlocal busy
        busy = max(busy, request.received) + 0.01
        events = [(busy - request.received, text("a", "length")), (0.0, usage(4, 1) + DONE)]
        return Answer(events)

    path = tmp_path / "result.json"
    with serving(script) as server:
        # Regular arrivals, so that nothing but the queue makes a request late.
        flags = "--find-capacity --slo-ttft 0.15 --burstiness 1e6 --input-len 4 --output-len 1"
        flags += " --num-requests 3 --warm-up-requests 1 --capacity-seconds 1"
        assert command(server, flags, f"--json {path}") == 0
    result = json.loads(path.read_text())
    capacity = result["figures"]["capacity_requests_per_second"]
    # A queue may grow for a second before a tenth of its requests wait for more than 150 ms.
    assert 60 < capacity < 130
    assert capacity < result["figures"]["too_high_requests_per_second"] <= capacity * 1.1 + 1e-9
    assert result["probes"][0]["request_rate"] == 1.0
    for probe in result["probes"]:
        met = probe["good_share"] >= 0.9
        assert met == (probe["request_rate"] <= capacity)
    assert f"capacity: {capacity:.3g} requests/s" in capsys.readouterr().out


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
