"""The load generator and the server's own metrics tell the same about the same requests."""

import json
from collections import Counter

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import running

from shoal.cli import main

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    with running(directory, str(model_path), "--max-num-seqs", "4") as process:
        yield process


def metrics(server):
    """The sum of the samples of each name, and the ended requests by their reason."""
    sums = Counter()
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] += sample.value
            if sample.name == "shoal:request_success_total":
                sums[sample.labels["finished_reason"]] += sample.value
    return sums


class Comparison:
    """One run of the load generator beside what the server's metrics counted meanwhile."""

    def __init__(self, server, path, flags):
        before = metrics(server)
        flags = f"bench serve --base-url {server.url} --json {path} --num-requests 16 {flags}"
        flags += " --input-len 10:60 --output-len 8:24 --warm-up-requests 0"
        assert main(flags.split()) == 0
        self.figures = json.loads(path.read_text())["figures"]
        self.counted = metrics(server)
        self.counted.subtract(before)

    def mean_ms(self, name):
        return self.counted[f"{name}_seconds_sum"] / self.counted[f"{name}_seconds_count"] * 1e3


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("arrivals", ["--concurrency 6", "--request-rate 8"])
def test_requests_and_tokens_agree_with_the_metrics(server, tmp_path, endpoint, arrivals):
    run = Comparison(server, tmp_path / "result.json", f"--endpoint {endpoint} {arrivals}")
    assert run.figures["requests_completed"] == run.counted["length"] == 16
    assert run.figures["input_tokens"] == run.counted["shoal:prompt_tokens_total"]
    assert run.figures["output_tokens"] == run.counted["shoal:generation_tokens_total"]


def test_mean_latencies_agree_with_the_metrics(server, tmp_path):
    """The client's times hold the way to the server and back.

    It is milliseconds where each process has a CPU when it wants one; the slack is for machines on
    which it waits. In a closed loop requests are due when they are sent, so the load generator
    itself adds nothing.
    """
    run = Comparison(server, tmp_path / "result.json", "--concurrency 6")
    for name, metric, slack_ms in (
        ("ttft", "shoal:time_to_first_token", 30),
        ("e2e", "shoal:e2e_request_latency", 30),
        ("tpot", "shoal:time_per_output_token", 3),
    ):
        expected = pytest.approx(run.mean_ms(metric), rel=0.02, abs=slack_ms)
        assert run.figures[f"{name}_mean_ms"] == expected


def test_prompts_of_token_ids_have_exactly_the_lengths_of_the_workload(server, tmp_path):
    path = tmp_path / "result.json"
    flags = f"bench serve --base-url {server.url} --concurrency 2 --json {path}"
    flags += " --num-requests 4 --input-len 33 --output-len 5"
    assert main(flags.split()) == 0
    result = json.loads(path.read_text())
    assert result["run"]["prompts"] == "token ids"
    assert result["run"]["prefix_cache"] == "cold: fresh prompts, cache reset after the warm-up"
    assert result["figures"]["prefix_cache_hit_rate"] == 0.0
    assert result["figures"]["input_tokens"] == 4 * 33
    assert result["figures"]["output_tokens"] == 4 * 5
