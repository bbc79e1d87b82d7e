"""The search: few trials, the promising ones first, and the close ones again in turns.

It climbs on the grid from the defaults, one limit at a time and in factors of two; gives the other
strategies a chance with the best number of sequences; tries the values between; and measures the
best few and the defaults again, A B C A B C, because a machine is never quiet. What can't win any
more is given up before its end. A part of the budget is kept for the repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

from shoal.bench.errors import BenchError
from shoal.bench.tuning.space import AXES, COARSE, FINE, Axis, Setting, Space
from shoal.bench.tuning.trial import Objective, Score, Status, Trial
from shoal.config import SchedulerName

STRATEGY_CHANCE = 0.7  # of the best score, for a strategy whose own limits aren't found yet
MAX_ROUNDS, RESERVED_ROUNDS = 3, 2
MAX_RESERVE = 0.4  # of the budget
MAX_FINALISTS = 3

OnTrial = Callable[[str, float], None]  # is told what begins, and how many seconds are spent


@dataclass(slots=True)
class Budget:
    """The seconds that a search may take, from now on."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    _start: float = field(init=False)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    @property
    def left(self) -> float:
        """Seconds that remain; below 0 when the budget is overdrawn."""
        return self.seconds - self.spent


@dataclass(frozen=True, slots=True)
class Found:
    """The result. `rounds` are the repetitions, each of the finalists in turn.

    `unreached` names the parts of the search that the budget didn't reach.
    """

    reference: Trial  # the defaults
    best: Trial
    trials: list[Trial]
    rounds: list[dict[Setting, Trial]]
    unreached: list[str]
    edges: list[Axis]  # on which nothing further than the best setting was tried
    seconds: float

    @property
    def gain(self) -> float:
        """By how much the best score is above that of the defaults, as a share of the latter."""
        if self.best.setting == self.reference.setting:
            return 0.0
        return median(self.gains or [self.first_gain])

    @property
    def first_gain(self) -> float:
        """The same when both were tried for the first time."""
        return _ratio(_value(self.best), _value(self.reference)) - 1

    @property
    def gains(self) -> list[float]:
        """The same of each round."""
        best, reference = self.best.setting, self.reference.setting
        return [
            _ratio(_value(trials[best]), _value(trials[reference])) - 1 for trials in self.rounds
        ]

    @property
    def noise(self) -> float | None:
        """How far repetitions of one setting lie apart, as a share; None without repetitions."""
        if len(self.rounds) < 2:
            return None
        spreads = []
        for setting in self.rounds[0]:
            values = [_value(trials[setting]) for trials in self.rounds]
            spreads.append(_ratio(max(values) - min(values), median(values)))
        return max(spreads)


class _OutOfTimeError(Exception):
    """The part of the budget for exploring is spent."""


class Search:
    """One search.

    Args:
        space: what may be tried.
        objective: what is wanted.
        budget: how long it may take.
        on_trial: told of each trial before it begins.
    """

    def __init__(
        self, space: Space, objective: Objective, budget: Budget, on_trial: OnTrial
    ) -> None:
        self._space = space
        self._objective = objective
        self._budget = budget
        self._on_trial = on_trial
        self._trials: dict[Setting, Trial] = {}

    def run(self) -> Found:
        """Search until nothing better is near or the budget is spent.

        Raises:
            BenchError: the budget is too short for a single trial, or every one failed.
        """
        reference = self._measure_reference()
        unreached = self._explore()
        finalists = self._finalists(reference)
        rounds = self._alternate(finalists)
        best = finalists[0]
        if rounds:
            best = max(
                finalists,
                key=lambda trial: Score.median_of([_score(r[trial.setting]) for r in rounds]),
            )
        elif len(finalists) > 1:
            unreached.append("repetitions of the best")
        return Found(
            reference=reference,
            best=best,
            trials=list(self._trials.values()),
            rounds=rounds,
            unreached=unreached,
            edges=[axis for axis in AXES if self._is_at_edge(best.setting, axis)],
            seconds=self._budget.spent,
        )

    def _measure_reference(self) -> Trial:
        """The defaults of the first strategy with which all requests are answered."""
        for strategy in self._space.strategies:
            setting = self._space.start(strategy)
            self._on_trial(str(setting), self._budget.spent)
            trial = self._objective.measure(setting, None, self._budget.left)
            self._trials[setting] = trial
            if trial.status is Status.MEASURED:
                return trial
            if trial.status is Status.OUT_OF_TIME:
                raise BenchError(
                    f"one trial takes longer than the budget of {self._budget.seconds / 60:g} "
                    "minutes: give more budget_minutes or fewer num_requests"
                )
        raise BenchError(f"every trial failed; the last: {trial.message}")

    def _explore(self) -> list[str]:
        """Try settings; returns what the budget didn't reach."""
        first = self._best.setting.scheduler
        others = [name for name in self._space.strategies if name != first]
        parts: list[tuple[str, Callable[[], None]]] = [
            (f"limits of {first}", lambda: self._climb(self._best, COARSE)),
            *((strategy, partial(self._give_chance, strategy)) for strategy in others),
            ("values between", lambda: self._climb(self._best, FINE)),
        ]
        for index, (_, explore) in enumerate(parts):
            try:
                explore()
            except _OutOfTimeError:
                return [name for name, _ in parts[index:]]
        return []

    def _give_chance(self, strategy: SchedulerName) -> None:
        """Try a strategy with the best number of sequences; climb from there if it is near."""
        start = self._space.start(strategy)
        seqs = self._best.setting.max_num_seqs
        if seqs in self._space.grid(start, "max_num_seqs"):
            start = Setting(start.scheduler, seqs, start.max_num_batched_tokens)
        trial = self._try(start, _value(self._best) * STRATEGY_CHANCE)
        if trial.score is not None and trial.score.value >= _value(self._best) * STRATEGY_CHANCE:
            self._climb(trial, COARSE)

    def _climb(self, best: Trial, step: int) -> None:
        """Follow one limit after the other upwards or downwards, as long as that helps."""
        improved = True
        while improved:
            improved = False
            for axis in AXES:
                further = self._follow(best, axis, step)
                improved |= further is not best
                best = further

    def _follow(self, start: Trial, axis: Axis, step: int) -> Trial:
        best = start
        for direction in (step, -step):
            while (setting := self._space.neighbour(best.setting, axis, direction)) is not None:
                trial = self._try(setting, _value(best) * (1 - self._objective.closeness))
                if trial.score is None or trial.score <= _score(best):
                    break
                best = trial
            if best is not start:
                break
        return best

    def _try(self, setting: Setting, to_reach: float) -> Trial:
        """Measure a setting once; a trial that the budget cuts short ends the exploration."""
        if setting in self._trials:
            return self._trials[setting]
        seconds = self._budget.left - self._reserve
        if seconds < median(self._repeat_seconds) / 2:
            raise _OutOfTimeError
        self._on_trial(str(setting), self._budget.spent)
        trial = self._objective.measure(setting, to_reach, seconds)
        self._trials[setting] = trial
        if trial.status is Status.OUT_OF_TIME:
            raise _OutOfTimeError
        return trial

    @property
    def _reserve(self) -> float:
        """Seconds kept for the best and the defaults in turns."""
        wanted = 2 * RESERVED_ROUNDS * max(self._repeat_seconds)
        return min(wanted, MAX_RESERVE * self._budget.seconds)

    @property
    def _repeat_seconds(self) -> list[float]:
        return [trial.repeat_seconds for trial in self._measured]

    @property
    def _measured(self) -> list[Trial]:
        return [trial for trial in self._trials.values() if trial.score is not None]

    @property
    def _best(self) -> Trial:
        return max(self._measured, key=_score)

    def _finalists(self, reference: Trial) -> list[Trial]:
        """The best, those close to it, and the defaults; alone if they are the best by far."""
        ranked = sorted(self._measured, key=_score, reverse=True)
        if _value(ranked[0]) == 0:
            return [reference]  # nothing does what is wanted
        limit = _value(ranked[0]) * (1 - max(0.0, self._objective.closeness))
        close = [trial for trial in ranked if _value(trial) >= limit and trial is not reference]
        if ranked[0] is reference:
            return [reference, *close[: MAX_FINALISTS - 1]]
        return [*close[: MAX_FINALISTS - 1], reference]

    def _alternate(self, finalists: list[Trial]) -> list[dict[Setting, Trial]]:
        """Whole rounds over the finalists, as many as the budget allows and no more than needed."""
        rounds: list[dict[Setting, Trial]] = []
        seconds = sum(trial.repeat_seconds for trial in finalists)
        while len(finalists) > 1 and len(rounds) < MAX_ROUNDS and self._budget.left >= seconds:
            trials: dict[Setting, Trial] = {}
            for finalist in finalists:
                setting = finalist.setting
                self._on_trial(f"round {len(rounds) + 1}: {setting}", self._budget.spent)
                trial = self._objective.repeat(setting, finalists[0], self._budget.left)
                if trial.score is None:
                    return rounds
                trials[setting] = trial
            rounds.append(trials)
            seconds = sum(trial.seconds for trial in trials.values())
        return rounds

    def _is_at_edge(self, setting: Setting, axis: Axis) -> bool:
        """Whether nothing beyond was tried on one of the two sides."""
        values = [
            getattr(other, axis) for other in self._trials if other.scheduler == setting.scheduler
        ]
        return getattr(setting, axis) in {min(values), max(values)}


def _score(trial: Trial) -> Score:
    assert trial.score is not None
    return trial.score


def _value(trial: Trial) -> float:
    return _score(trial).value


def _ratio(value: float, reference: float) -> float:
    """`value` / `reference`; infinite for something against nothing, 1 for nothing against it."""
    if reference > 0:
        return value / reference
    return float("inf") if value > 0 else 1.0
