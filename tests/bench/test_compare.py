"""Comparing strategies: the report's figures, pictures and words come from the same runs."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.bench import compare
from shoal.bench.client.load import Failure
from shoal.bench.compare import CompareConfig
from shoal.bench.comparison.advice import advice_on, crossover
from shoal.bench.comparison.charts import curves, slots_used, timelines
from shoal.bench.comparison.comparison import Comparison, Run
from shoal.bench.errors import BenchError
from shoal.bench.results.disturbance import MAX_TAKEN_SHARE, STOLEN, TAKEN
from shoal.bench.results.measure import RequestTimeline, Slo
from shoal.bench.runs.outcome import Outcome
from shoal.bench.runs.steps import EngineRecord, RowKind, StepRecord
from shoal.bench.workloads.lengths import LengthRange
from shoal.bench.workloads.workload import ComparedWorkload
from shoal.config import ConfigError, EngineConfig

STRATEGIES = ("static", "dynamic", "continuous")


@pytest.fixture(scope="module")
def report(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("compare") / "report.html"
    workload = ComparedWorkload(
        num_requests=5, input_len=LengthRange(10, 40), output_len=LengthRange(2, 12)
    )
    config = CompareConfig(
        workload=workload,
        model=str(model_path),
        max_num_seqs=2,
        kv_cache_memory_mib=64,
        load=(0.8,),
        slo=Slo(e2e=100.0),
        output=output,
    )
    assert compare.run(config) == 0
    return output


def test_the_figures_of_the_report_are_those_of_the_json(report: Path) -> None:
    content = json.loads(report.with_suffix(".json").read_text())
    html = report.read_text()
    assert len(content["runs"]) == 6
    cells = re.findall(r"<td>([^<]*)</td>", html)
    for run in content["runs"]:
        figures = run["figures"]
        assert figures["requests_completed"] == 5
        assert f"{figures['requests_per_second']:,.2f}" in cells
        assert f"{figures['e2e_mean_ms'] / 1e3:,.2f}" in cells
    for sentence in content["advice"]:
        assert sentence.split(":")[0].replace("'", "&#39;") in html


def test_the_words_tell_figures_of_the_json(report: Path) -> None:
    content = json.loads(report.with_suffix(".json").read_text())
    runs = {(run["load"], run["strategy"]): run["figures"] for run in content["runs"]}
    speeds = [runs["all at once", name]["output_tokens_per_second"] for name in STRATEGIES]
    latencies = [runs["80% load", name]["e2e_mean_ms"] / 1e3 for name in STRATEGIES]
    assert f"throughput: {max(speeds):.0f} output tokens/s" in content["advice"][0]
    assert f"{max(speeds) / min(speeds):.2f}x" in content["advice"][0]
    for latency, name in zip(latencies, STRATEGIES, strict=True):
        assert f"{latency:.2f} s with {name}" in content["advice"][1]
    capacity = max(runs["all at once", name]["requests_per_second"] for name in STRATEGIES)
    assert content["capacity_requests_per_second"] == capacity
    assert f"shares of {capacity:.2f} requests a second" in report.read_text()
    (rate,) = {run["rate"] for run in content["runs"] if run["load"] == "80% load"}
    assert rate == pytest.approx(0.8 * capacity)


def test_the_report_tells_what_others_had_of_the_machine(report: Path) -> None:
    content = json.loads(report.with_suffix(".json").read_text())
    html = report.read_text()
    for run in content["runs"]:
        assert 0 <= run["figures"][STOLEN] <= run["figures"][TAKEN] <= 1
    assert "others&#39; CPU (%)</th>" in html
    is_disturbed = any(run["figures"][TAKEN] > MAX_TAKEN_SHARE for run in content["runs"])
    assert bool(content["warnings"]) == is_disturbed
    assert all(sentence in html for sentence in content["warnings"])


def test_the_report_says_that_the_engine_ran_in_this_process(report: Path) -> None:
    content = json.loads(report.with_suffix(".json").read_text())
    assert content["mode"] == "in this process"
    assert "no HTTP, no second process" in report.read_text()
    assert "What failed" not in report.read_text()
    assert ">failed</th>" not in report.read_text()


def test_a_request_that_never_fits_is_a_failure_and_not_the_end(
    model_path: Path, tmp_path: Path
) -> None:
    (tmp_path / "requests.csv").write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,9000,2\n0.1,20,2\n"
    )
    config = CompareConfig(
        workload=ComparedWorkload(trace=tmp_path / "requests.csv"),
        scheduler=("continuous",),
        model=str(model_path),
        kv_cache_memory_mib=64,
        load=(),
        output=tmp_path / "report.html",
    )
    assert compare.run(config) == 1
    html = config.output.read_text()
    assert "continuous, all at once: 1 x rejected" in html
    assert "9000" in html


def test_slots_over_time_count_a_step_as_long_as_it_lasts() -> None:
    def step(start: float, end: float, useful: int) -> StepRecord:
        return StepRecord(start, end, {}, 0, 4, useful, 0, 0)

    shares = slots_used([step(0, 3, 4), step(3, 4, 0), step(6, 8, 2)], np.arange(0.0, 10.0, 2))
    assert shares.tolist()[:2] == [1.0, 0.5]
    assert np.isnan(shares[2])
    assert shares[3] == 0.5


def test_a_comparison_without_an_answer_says_why() -> None:
    engine = EngineRecord([], [], num_blocks=10, num_preemptions=0)
    outcome = Outcome([], [Failure("refused", "the queue is full")], engine)
    measured = Comparison({"static": EngineConfig()}, [], [], Slo(), 0, lambda *run: outcome)
    with pytest.raises(BenchError, match=r"static: no request completed; .* the queue is full"):
        measured.measure_all(lambda what: None)


def test_the_report_needs_no_other_file(report: Path) -> None:
    html = report.read_text()
    sources = re.findall(r'src="([^"]*)"', html)
    assert len(sources) == 4
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r"base64,[^\"]*", "", html)


def test_each_picture_is_a_png_1200_pixels_wide(report: Path) -> None:
    for name in ("timeline", "curves", "distributions", "utilization"):
        picture = report.with_name(f"report-{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert int.from_bytes(picture[16:20], "big") == 1200


@pytest.mark.parametrize(
    "settings",
    [
        {"load": (0.0,)},
        {"scheduler": ()},
        {"scheduler": ("static", "static")},
        {"output": Path("report.json")},
        {"load": (0.5, 0.5)},
        {"scheduler": ("continuous",), "skip_padding": True},
        {"scheduler": ("continuous",), "max_queue_delay": 1.0},
        {"scheduler": ("dynamic",), "max_num_batched_tokens": 64},
    ],
    ids=[
        "no load",
        "no strategy",
        "a strategy twice",
        "the file of the JSON",
        *("a load twice", "no padding", "no delay", "no budget"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        CompareConfig(**settings)


@pytest.mark.parametrize("taken", ["report.html", "report.json", "report-curves.png"])
def test_a_report_that_can_not_be_written_is_refused_before_anything_runs(
    tmp_path: Path, taken: str
) -> None:
    (tmp_path / taken).mkdir()
    with pytest.raises(ConfigError, match=f"output .*{taken} can't be written: Is a directory"):
        compare.run(CompareConfig(model="no-such-model", output=tmp_path / "report.html"))


def test_each_strategy_gets_the_settings_that_it_has() -> None:
    config = CompareConfig(
        max_num_batched_tokens=64,
        skip_padding=True,
        max_queue_delay=0.2,
        instruction_set="portable",
    )
    assert all(config.engine(name).instruction_set == "portable" for name in config.scheduler)
    assert config.engine("static").skip_padding
    assert config.engine("dynamic").max_queue_delay == 0.2
    assert config.engine("dynamic").max_num_batched_tokens is None
    assert config.engine("continuous").max_num_batched_tokens == 64


def comparison(latencies: dict[float, dict[str, float]], **stats: int) -> Comparison:
    """What a comparison would be whose mean latencies (seconds) by load and strategy are these."""
    engine = EngineRecord([], [0.0], num_blocks=10, num_preemptions=0)
    outcome = Outcome([RequestTimeline(0, 1, 2, 3, 4)], [], engine)

    def run(strategy: str, latency: float) -> Run:
        figures = {
            "requests_per_second": 2.0,
            "output_tokens_per_second": 100.0 if strategy == "continuous" else 40.0,
            "e2e_mean_ms": latency * 1e3,
            "ttft_mean_ms": 100.0,
            "queue_time_mean_ms": 80.0,
            "slot_utilization": 0.5,
            "kv_cache_usage_max": 0.3,
            "preemptions": 0,
        }
        return Run(strategy, 1.0, outcome, figures | stats)

    strategies = next(iter(latencies.values()))
    result = Comparison(dict.fromkeys(strategies, EngineConfig()), [], list(latencies), Slo(), 0)
    result.at_once = {strategy: run(strategy, 1.0) for strategy in strategies}
    result.loaded = {
        load: {strategy: run(strategy, value) for strategy, value in by_strategy.items()}
        for load, by_strategy in latencies.items()
    }
    return result


def test_the_crossover_lies_where_the_lines_meet() -> None:
    measured = comparison(
        {0.2: {"dynamic": 1.0, "continuous": 2.0}, 0.6: {"dynamic": 4.0, "continuous": 3.0}}
    )
    assert crossover(measured, "continuous", "dynamic") == pytest.approx(0.4)
    assert crossover(measured, "dynamic", "continuous") is None


def test_one_that_wins_everywhere_has_no_crossover() -> None:
    measured = comparison({0.2: {"static": 3.0, "continuous": 2.0}})
    assert crossover(measured, "continuous", "static") == 0.0


def test_the_words_say_what_to_choose_and_why() -> None:
    text = " ".join(advice_on(comparison({0.5: {"static": 9.0, "continuous": 2.0}})))
    assert "continuous has the highest throughput: 100 output tokens/s, 2.50x static" in text
    assert "choose continuous for this load" in text
    assert "static used 50% of its slots" in text
    assert "80% of the time to first token is waiting in the queue" in text


def test_every_sentence_says_which_load_it_is_about() -> None:
    loads = {0.5: {"static": 1.0, "continuous": 2.0}, 0.9: {"static": 9.0, "continuous": 2.0}}
    for loaded in (loads, {0.5: loads[0.5]}):
        for sentence in advice_on(comparison(loaded)):
            assert re.search(r"[Aa]ll at once|\d+% load|every load measured, 50% to 90%", sentence)
    (limit,) = [s for s in advice_on(comparison(loads)) if "more slots" in s]
    assert limit.startswith("At 90% load, continuous: 80% of the time to first token")


@pytest.mark.parametrize("strategy", ["static", "continuous"])
def test_words_about_a_disturbed_run_are_doubtful(strategy: str) -> None:
    measured = comparison({0.5: {"static": 9.0, "continuous": 2.0}})
    assert "Uncertain" not in " ".join(advice_on(measured))
    measured.loaded[0.5][strategy].figures[TAKEN] = 0.23
    throughput, latency, crossover_, *rest = advice_on(measured)
    doubt = "Uncertain: other processes had up to 23% of the CPUs meanwhile."
    assert "Uncertain" not in throughput
    assert latency.endswith(f"continuous may be the best choice for this load. {doubt}")
    assert crossover_.endswith(doubt)
    assert [s.endswith(doubt) for s in rest if "At 50% load" in s] == (
        [strategy == "continuous"] * sum("At 50% load" in s for s in rest)
    )


def test_strategies_within_the_noise_are_not_told_apart() -> None:
    text = " ".join(advice_on(comparison({0.5: {"dynamic": 2.05, "continuous": 2.0}})))
    assert "too close to tell apart" in text


def test_preemptions_are_named_with_their_remedy() -> None:
    measured = comparison({0.5: {"static": 9.0, "continuous": 2.0}}, preemptions=3)
    assert "3 preemptions: the KV pool is too small" in " ".join(advice_on(measured))


def test_a_full_kv_pool_is_named_as_what_the_queue_waits_for() -> None:
    measured = comparison({0.5: {"static": 9.0, "continuous": 2.0}})
    for run in measured.loaded[0.5].values():
        run.figures["kv_cache_usage_max"] = 0.96
    assert "this load needs a larger kv_cache_memory_mib" in " ".join(advice_on(measured))


def test_the_timeline_shows_every_strategy_to_its_end() -> None:
    def run(strategy: str, end: float) -> Run:
        step = StepRecord(0.0, end, {"a": RowKind.DECODE}, 1, 1, 1, 1, 0)
        engine = EngineRecord([step], [0.0], num_blocks=10, num_preemptions=0)
        figures = {"slot_utilization": 1.0}
        return Run(strategy, None, Outcome([], [], engine), figures)

    figure = timelines({"static": run("static", 5.0), "continuous": run("continuous", 10.0)})
    assert [axes.get_xlim() for axes in figure.axes] == [(0.0, 10.0)] * 2


def test_a_strategy_alone_can_be_measured() -> None:
    config = replace(CompareConfig(), scheduler=("continuous",))
    assert config.engine("continuous").scheduler == "continuous"


def test_the_loads_beside_the_curves_hide_each_other_nowhere() -> None:
    latencies = {"static": 3.0, "dynamic": 2.98, "continuous": 3.02}
    measured = comparison({0.2: dict.fromkeys(STRATEGIES, 1.0), 1.0: latencies})
    for runs in measured.loaded.values():
        for run in runs.values():
            run.figures["ttft_p90_ms"] = 1.0
            run.figures["output_tokens_per_second"] = 40.0
    figure = curves(measured)
    figure.savefig(io.BytesIO())
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 6
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
