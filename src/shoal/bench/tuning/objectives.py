"""What can be wanted of a setting, and how one trial measures it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shoal.bench.results.disturbance import CpuWatch
from shoal.bench.results.measure import Slo
from shoal.bench.results.report import Figures
from shoal.bench.runs.capacity import SUSTAINED_SHARE, RateSearch
from shoal.bench.runs.patience import Patience
from shoal.bench.runs.replay import Replay, replay_in_process
from shoal.bench.tuning.space import Setting
from shoal.bench.tuning.trial import Objective, Score, Status, Trial
from shoal.bench.workloads.arrivals import gamma_arrivals
from shoal.bench.workloads.workload import WorkloadRequest
from shoal.config import EngineConfig

RATE_PRECISION = 0.1
RATE_FACTOR = 1.3
FIRST_RATE_SHARE = 0.7  # of the throughput with all requests there
LOWEST_RATE_SHARE = 0.1  # of the first rate: if that is too high a request alone is too slow

Replayer = Callable[[EngineConfig, Sequence[WorkloadRequest], Sequence[float], Patience], Replay]


@dataclass(frozen=True, slots=True)
class TrialBench:
    """Where trials are made: the workload, the settings that all share, and the SLO."""

    config: EngineConfig
    requests: Sequence[WorkloadRequest]
    slo: Slo
    replay: Replayer = replay_in_process
    clock: Callable[[], float] = time.monotonic

    def run(
        self, setting: Setting, times: Sequence[float], patience: Patience, seconds: float
    ) -> Trial:
        """Replay the requests within `seconds`; there are figures only if it came to its end."""
        start = self.clock()
        limited = replace(patience, max_seconds=min(patience.max_seconds, seconds))
        config = setting.on(self.config)
        if any(times):  # requests come one after the other, as they come to a server
            config = config.for_serving()
        replay = self.replay(config, self.requests, times, limited)
        spent = self.clock() - start
        if replay.failures:
            return Trial(setting, Status.FAILED, spent, message=replay.failures[0].message)
        if replay.given_up:
            is_over = patience.max_seconds > seconds and spent >= seconds
            return Trial(setting, Status.OUT_OF_TIME if is_over else Status.WORSE, spent)
        figures = replay.outcome.figures(self.slo)
        return Trial(setting, Status.MEASURED, spent, figures=figures)


@dataclass(frozen=True, slots=True)
class Throughput:
    """Output tokens a second with all requests there at the start."""

    bench: TrialBench
    closeness: float = 0.05

    def measure(self, setting: Setting, to_reach: float | None, seconds: float) -> Trial:
        """Try a setting; it is given up when it has taken too long for `to_reach`."""
        num_tokens = sum(request.max_tokens for request in self.bench.requests)
        longest = num_tokens / to_reach if to_reach else math.inf
        times = [0.0] * len(self.bench.requests)
        trial = self.bench.run(setting, times, Patience(max_seconds=longest), seconds)
        return _scored(trial, "output_tokens_per_second")

    def repeat(self, setting: Setting, best: Trial, seconds: float) -> Trial:
        """Try a setting to the end."""
        del best
        return self.measure(setting, None, seconds)


@dataclass(frozen=True, slots=True)
class GoodShare:
    """The share of the requests that meet the SLO when they arrive at `times`.

    With the arrivals given, it orders settings as their goodput does. Between equal shares the
    lower mean latency decides.
    """

    bench: TrialBench
    times: Sequence[float]
    rate: float | None
    closeness: float = 0.05

    def measure(self, setting: Setting, to_reach: float | None, seconds: float) -> Trial:
        """Try a setting; it is given up when too many have missed the SLO for `to_reach`."""
        most = _most_misses(len(self.times), to_reach) if to_reach is not None else math.inf
        patience = Patience(slo=self.bench.slo, max_misses=most)
        trial = self.bench.run(setting, self.times, patience, seconds)
        return replace(_scored(trial, "good_share"), rate=self.rate)

    def repeat(self, setting: Setting, best: Trial, seconds: float) -> Trial:
        """Try a setting to the end."""
        del best
        return self.measure(setting, None, seconds)


@dataclass(frozen=True, slots=True)
class HighestRate:
    """The highest Poisson rate that is achieved and at which a `share` meets the SLO."""

    bench: TrialBench
    share: float
    seed: int
    closeness: float = -RATE_PRECISION

    def measure(self, setting: Setting, to_reach: float | None, seconds: float) -> Trial:
        """Search the rate from `to_reach` upwards; if that is too high the setting is given up.

        Without it the search begins below the throughput with all requests there.
        """
        deadline = self.bench.clock() + seconds
        if not to_reach:
            offline = Throughput(self.bench).measure(setting, None, seconds)
            if offline.status is not Status.MEASURED:
                return offline
            first = FIRST_RATE_SHARE * offline.figures["requests_per_second"]
        else:
            first = to_reach
        search = RateSearch(RATE_PRECISION, first, RATE_FACTOR)
        best = Trial(setting, Status.MEASURED, 0.0)
        while not search.done and search.rate > first * LOWEST_RATE_SHARE:
            trial = self._at(setting, search.rate, self.share, deadline - self.bench.clock())
            if trial.status in {Status.FAILED, Status.OUT_OF_TIME}:
                return replace(trial, seconds=seconds - deadline + self.bench.clock())
            kept = self._is_kept(trial, search.rate)
            if kept:
                best = trial
            elif to_reach and search.low == 0:
                return replace(trial, status=Status.WORSE, score=None)
            search.note(kept=kept)
        spent = seconds - deadline + self.bench.clock()
        return replace(
            best,
            score=Score(search.low),
            rate=search.low,
            seconds=spent,
            run_seconds=best.seconds or spent,
        )

    def repeat(self, setting: Setting, best: Trial, seconds: float) -> Trial:
        """Measure the share that meets the SLO at the rate of the best setting."""
        assert best.rate is not None
        return self._at(setting, best.rate, None, seconds)

    def _is_kept(self, trial: Trial, rate: float) -> bool:
        """Whether enough met the SLO, and not because a queue swallowed a run that is too short."""
        if trial.score is None or trial.score.value < self.share:
            return False
        return trial.figures["requests_per_second"] >= SUSTAINED_SHARE * rate

    def _at(self, setting: Setting, rate: float, to_reach: float | None, seconds: float) -> Trial:
        arrivals = gamma_arrivals(rate, 1.0, len(self.bench.requests), self.seed)
        return GoodShare(self.bench, arrivals.times, rate).measure(setting, to_reach, seconds)


@dataclass(frozen=True, slots=True)
class Watched:
    """An objective whose trials also tell how much of the machine others had meanwhile."""

    objective: Objective

    @property
    def closeness(self) -> float:
        """As the objective has it."""
        return self.objective.closeness

    def measure(self, setting: Setting, to_reach: float | None, seconds: float) -> Trial:
        """Try a setting as the objective does."""
        watch = CpuWatch()
        return _with_figures(self.objective.measure(setting, to_reach, seconds), watch.figures())

    def repeat(self, setting: Setting, best: Trial, seconds: float) -> Trial:
        """Try a setting again as the objective does."""
        watch = CpuWatch()
        return _with_figures(self.objective.repeat(setting, best, seconds), watch.figures())


def _with_figures(trial: Trial, figures: Figures) -> Trial:
    return replace(trial, figures=trial.figures | figures)


def _most_misses(num_requests: int, share: float) -> int:
    """How many requests may miss the SLO if `share` of them has to meet it."""
    return num_requests - math.ceil(share * num_requests - 1e-9)


def _scored(trial: Trial, figure: str) -> Trial:
    """The trial with a score from its figures, if it has any."""
    if trial.status is not Status.MEASURED:
        return trial
    return replace(trial, score=Score(trial.figures[figure], -trial.figures["e2e_mean_ms"]))
