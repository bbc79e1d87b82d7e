"""The benchmark on the real engine with the demo model."""

import json
from dataclasses import asdict
from importlib.metadata import version

import pytest

from shoal.bench.results.report import make_table
from shoal.bench.throughput import ThroughputConfig, run
from shoal.bench.workloads.workload import LengthRange, Workload, generate_requests
from shoal.cli import main
from shoal.config import EngineConfig

WORKLOAD = Workload(
    num_requests=5, input_len=LengthRange(4, 40), output_len=LengthRange(1, 6), seed=3
)


@pytest.fixture(scope="module")
def measured(model_path, tmp_path_factory):
    path = tmp_path_factory.mktemp("throughput") / "result.json"
    engine = EngineConfig(model=str(model_path), max_num_seqs=2, max_num_batched_tokens=16)
    assert run(ThroughputConfig(workload=WORKLOAD, engine=engine, json=path)) == 0
    return json.loads(path.read_text())


def test_every_request_gets_exactly_the_tokens_that_the_workload_says(measured):
    requests = generate_requests(WORKLOAD, range(100))
    figures = measured["figures"]
    assert figures["requests_completed"] == 5
    assert figures["requests_failed"] == 0
    assert figures["input_tokens"] == sum(len(request.prompt_token_ids) for request in requests)
    assert figures["output_tokens"] == sum(request.max_tokens for request in requests)


def test_the_rates_are_the_counts_by_the_duration(measured):
    figures = measured["figures"]
    for rate, count in [
        ("requests_per_second", "requests_completed"),
        ("input_tokens_per_second", "input_tokens"),
        ("output_tokens_per_second", "output_tokens"),
    ]:
        assert figures[rate] == pytest.approx(figures[count] / figures["duration_s"])


def test_the_result_says_what_it_was_measured_on_and_with(measured):
    assert measured["shoal"] == version("shoal")
    assert measured["machine"]["cpus"] >= 1
    assert measured["machine"]["cpu"]
    assert measured["settings"]["max_num_seqs"] == 2
    assert measured["workload"]["seed"] == 3
    assert measured["engine"]["num_threads"] >= 1


def test_the_table_shows_what_the_file_holds(measured):
    table = make_table("title", measured["figures"])
    names, values = (list(column.cells) for column in table.columns)
    shown = dict(zip(names, values, strict=True))
    assert shown.keys() == measured["figures"].keys()
    for name, value in measured["figures"].items():
        assert float(shown[name].replace(",", "")) == pytest.approx(value, abs=5e-4)


def test_a_failed_request_is_counted_apart_and_told_by_the_exit_status(
    model_path, tmp_path, capsys
):
    path = tmp_path / "result.json"
    engine = EngineConfig(model=str(model_path), max_model_len=64, max_num_batched_tokens=64)
    workload = Workload(num_requests=6, input_len=LengthRange(40, 90), output_len=LengthRange(2, 2))
    too_long = sum(len(r.prompt_token_ids) >= 64 for r in generate_requests(workload, range(100)))
    assert 0 < too_long < 6
    assert run(ThroughputConfig(workload=workload, engine=engine, json=path)) == 1
    assert f"{too_long} requests failed" in capsys.readouterr().err
    figures = json.loads(path.read_text())["figures"]
    assert figures["requests_failed"] == too_long
    assert figures["requests_completed"] == 6 - too_long


def test_the_command_line_sets_workload_and_engine(model_path, tmp_path):
    path = tmp_path / "result.json"
    arguments = f"bench throughput --model {model_path} --num-requests 2 --input-len 5:9"
    arguments += f" --output-len 3 --workload-seed 11 --seed 5 --max-num-seqs 2 --json {path}"
    assert main(arguments.split()) == 0
    result = json.loads(path.read_text())
    workload = Workload(
        num_requests=2, input_len=LengthRange(5, 9), output_len=LengthRange(3, 3), seed=11
    )
    assert result["workload"] == asdict(workload)
    assert result["settings"]["seed"] == 5
    assert result["settings"]["max_num_seqs"] == 2


@pytest.mark.parametrize("length", ["9:5", "many", "0:3"])
def test_the_command_line_refuses_a_wrong_length_range(length, capsys):
    assert main(["bench", "throughput", "--input-len", length]) == 2
    assert "--input-len" in capsys.readouterr().err
