"""How a trial is measured, and when it is given up; engines are replaced by simple queues."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from shoal.bench.client.load import Failure
from shoal.bench.results.disturbance import TAKEN, CpuWatch
from shoal.bench.results.measure import RequestTimeline, Slo
from shoal.bench.runs.patience import Patience
from shoal.bench.runs.replay import Replay, replay_in_process
from shoal.bench.runs.steps import RowKind, StepRecord
from shoal.bench.tune import TuneConfig
from shoal.bench.tuning.objectives import (
    GoodShare,
    HighestRate,
    Throughput,
    TrialBench,
    Watched,
)
from shoal.bench.tuning.report import command
from shoal.bench.tuning.space import Setting
from shoal.bench.tuning.trial import Status
from shoal.bench.workloads.workload import WorkloadRequest
from shoal.cli import main
from shoal.config import ConfigError, EngineConfig
from shoal.scheduler.interface import SchedulerStats

REQUESTS = [WorkloadRequest([1, 2, 3], 10) for _ in range(40)]
SETTING = Setting("continuous", 32, 512)
STATS = SchedulerStats(
    num_requests_running=0,
    num_requests_waiting=0,
    num_blocks_total=10,
    num_blocks_used=0,
    num_preemptions=0,
)
STEP = StepRecord(0.0, 1.0, {"0": RowKind.DECODE}, 1, 1, 1, 1, 0)


@dataclass
class Queue:
    """Answers one request after the other, each in `service` seconds, on a clock of its own."""

    service: float
    failures: list[Failure] = field(default_factory=list)
    now: float = 0.0
    configs: list[EngineConfig] = field(default_factory=list)

    def replay(
        self,
        config: EngineConfig,
        requests: Sequence[WorkloadRequest],
        times: Sequence[float],
        patience: Patience,
    ) -> Replay:
        self.configs.append(config)
        free, missed = 0.0, 0
        timelines: list[RequestTimeline] = []
        given_up = False
        for request, arrival in zip(requests, times, strict=True):
            begin = max(free, arrival)
            free = begin + self.service
            timeline = RequestTimeline(arrival, free, free, 3, request.max_tokens)
            timelines.append(timeline)
            missed += not patience.slo.is_met_by(timeline)
            given_up = free > patience.max_seconds or missed > patience.max_misses
            if given_up:
                break
        self.now += min(free, patience.max_seconds)
        return Replay(timelines, [0.0], self.failures, [STEP], STATS, given_up)

    def bench(self, slo: Slo) -> TrialBench:
        return TrialBench(EngineConfig(), REQUESTS, slo, self.replay, lambda: self.now)


def test_throughput_is_given_up_when_it_can_no_longer_reach_the_goal() -> None:
    queue = Queue(0.1)  # 40 requests of 10 tokens in 4 seconds
    objective = Throughput(queue.bench(Slo()))
    trial = objective.measure(SETTING, None, 60)
    assert trial.score is not None
    assert trial.score.value == pytest.approx(100)
    assert objective.measure(SETTING, 99, 60).status is Status.MEASURED
    queue.now = 0
    assert objective.measure(SETTING, 200, 60).status is Status.WORSE
    assert queue.now == pytest.approx(2)  # 400 tokens at 200 tokens a second


def test_a_trial_that_the_budget_ends_is_not_called_worse() -> None:
    trial = Throughput(Queue(0.1).bench(Slo())).measure(SETTING, 101, 2)
    assert trial.status is Status.OUT_OF_TIME
    assert trial.score is None


def test_a_setting_with_which_requests_fail_has_no_score() -> None:
    queue = Queue(0.1, failures=[Failure("rejected", "too long")])
    trial = Throughput(queue.bench(Slo())).measure(SETTING, None, 60)
    assert (trial.status, trial.score, trial.message) == (Status.FAILED, None, "too long")


def test_the_good_share_is_given_up_when_too_many_have_missed() -> None:
    queue = Queue(0.1)
    times = [0.05 * index for index in range(40)]  # the queue grows by half a request each time
    objective = GoodShare(queue.bench(Slo(ttft=1.02)), times, 20.0)
    trial = objective.measure(SETTING, None, 60)
    assert trial.score is not None
    assert trial.score.value == pytest.approx(19 / 40)
    assert objective.measure(SETTING, 19 / 40, 60).status is Status.MEASURED
    assert objective.measure(SETTING, 20 / 40, 60).status is Status.WORSE


def test_between_equal_shares_the_lower_latency_wins() -> None:
    times = [float(index) for index in range(40)]
    slow, fast = (
        GoodShare(Queue(service).bench(Slo(e2e=5)), times, 1.0).measure(SETTING, None, 99)
        for service in (0.5, 0.4)
    )
    assert slow.score is not None
    assert fast.score is not None
    assert slow.score.value == fast.score.value == 1
    assert fast.score > slow.score


def test_a_batch_of_requests_that_come_one_by_one_waits_as_a_server_does() -> None:
    queue = Queue(0.1)
    static = Setting("static", 32, 512)
    Throughput(queue.bench(Slo())).measure(static, None, 60)
    GoodShare(queue.bench(Slo(e2e=9)), [float(i) for i in range(40)], 1.0).measure(static, None, 99)
    assert math.isinf(queue.configs[0].queue_delay)
    assert queue.configs[1].queue_delay == 1.0


def rate_of(queue: Queue, to_reach: float | None = None) -> float | None:
    trial = HighestRate(queue.bench(Slo(e2e=0.5)), 0.9, seed=0).measure(SETTING, to_reach, 9999)
    return None if trial.score is None else trial.score.value


def test_the_highest_rate_is_found_within_its_precision() -> None:
    queue = Queue(0.1)
    objective = HighestRate(queue.bench(Slo(e2e=0.5)), 0.9, seed=0)
    best = objective.measure(SETTING, None, 9999)
    assert best.rate is not None
    assert best.score is not None
    assert best.score.value == best.rate
    assert best.figures["good_share"] >= 0.9
    higher = objective.repeat(SETTING, replace(best, rate=best.rate * 1.11), 9999)
    assert higher.figures["good_share"] < 0.9


def test_a_rate_to_reach_that_is_too_high_costs_one_run() -> None:
    queue = Queue(0.1)
    rate = rate_of(queue)
    assert rate is not None
    queue.configs.clear()
    assert rate_of(queue, rate * 1.5) is None
    assert len(queue.configs) == 1
    assert rate_of(queue, rate * 0.8) == pytest.approx(rate, rel=0.1)


def test_a_rate_that_a_queue_only_swallows_is_not_kept() -> None:
    trial = HighestRate(Queue(0.1).bench(Slo(e2e=60)), 0.9, seed=0).measure(SETTING, None, 9999)
    assert trial.rate is not None
    assert 9 < trial.rate < 10 * 3 / 2 * 1.1  # it can do ten requests a second


def test_an_slo_that_nothing_meets_ends_the_search() -> None:
    queue = Queue(0.6)
    assert rate_of(queue) == 0
    assert len(queue.configs) < 12


def test_the_best_and_the_defaults_are_repeated_at_the_rate_of_the_best() -> None:
    objective = HighestRate(Queue(0.1).bench(Slo(e2e=0.5)), 0.9, seed=0)
    best = objective.measure(SETTING, None, 9999)
    repeated = objective.repeat(SETTING, best, 9999)
    assert repeated.rate == best.rate
    assert repeated.score is not None
    assert repeated.score.value == best.figures["good_share"]


def test_a_request_under_way_has_missed_what_it_can_no_longer_keep() -> None:
    patience = Patience(slo=Slo(ttft=1, e2e=3))
    assert patience.is_missed(2, has_token=False)
    assert not patience.is_missed(2, has_token=True)
    assert patience.is_missed(4, has_token=True)
    assert not Patience(slo=Slo(tpot=1)).is_missed(4, has_token=False)


@pytest.fixture(scope="module")
def engine(model_path: Path) -> EngineConfig:
    return EngineConfig(model=str(model_path), kv_cache_memory_mib=64)


def test_a_replay_ends_when_its_time_is_over(engine: EngineConfig) -> None:
    requests = [WorkloadRequest([2000] * 20, 2), WorkloadRequest([2001] * 20, 5)]
    replay = replay_in_process(engine, requests, [0.0, 1e6], Patience(max_seconds=0.0))
    assert replay.given_up
    assert not replay_in_process(engine, requests, [0.0, 0.0]).given_up


def test_a_replay_ends_when_too_many_have_missed_the_slo(engine: EngineConfig) -> None:
    requests = [WorkloadRequest([2000 + i] * 20, 4) for i in range(3)]
    impatient = Patience(slo=Slo(e2e=1e-6), max_misses=2)
    replay = replay_in_process(engine, requests, [0.0] * 3, impatient)
    assert replay.given_up
    assert not replay.timelines  # after the first step all three had waited too long
    bearing = Patience(slo=Slo(e2e=1e-6), max_misses=3)
    replay = replay_in_process(engine, requests[:1], [0.0], bearing)
    assert not replay.given_up


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--request-rate 2", "request_rate needs slo_ttft"),
        ("--request-rate 0 --slo-ttft 1", "request_rate must be above 0"),
        ("--budget-minutes 0", "budget_minutes must be above 0"),
        ("--slo-share 2", "slo_share"),
        ("--scheduler static --scheduler static", "each strategy once"),
    ],
)
def test_settings_without_sense_are_refused(
    flags: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *flags.split()]) == 2
    assert words in capsys.readouterr().err


def test_no_strategy_is_refused() -> None:
    with pytest.raises(ConfigError, match="each strategy once"):
        TuneConfig(scheduler=())


def test_the_command_names_the_instruction_set_of_the_trials() -> None:
    engine = TuneConfig(instruction_set="portable").engine
    assert "--instruction-set portable" in command(engine, SETTING)


def test_a_real_search_ends_with_a_command(
    model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tune.json"
    flags = f"tune --model {model_path} --kv-cache-memory-mib 64 --scheduler continuous"
    flags += (
        f" --num-requests 3 --input-len 8:16 --output-len 2:6 --budget-minutes 0.2 --json {path}"
    )
    assert main(flags.split()) == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["command"] == printed.splitlines()[-1]
    assert f"--max-num-seqs {result['best']['max_num_seqs']}" in result["command"]
    assert f"{len(result['trials'])} settings tried" in printed
    reference = result["trials"][0]
    assert (reference["max_num_seqs"], reference["status"]) == (32, "measured")
    assert reference["score"] == reference["figures"]["output_tokens_per_second"]


def test_trials_tell_what_others_had_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuWatch, "figures", lambda self: {TAKEN: 0.2})
    inner = Throughput(Queue(0.1).bench(Slo()))
    objective = Watched(inner)
    assert objective.closeness == inner.closeness
    best = objective.measure(SETTING, None, 60)
    given_up = objective.measure(SETTING, 1e6, 60)
    again = objective.repeat(SETTING, best, 60)
    assert [trial.figures[TAKEN] for trial in (best, given_up, again)] == [0.2] * 3
    assert best.score == again.score == inner.measure(SETTING, None, 60).score
