"""The search of `shoal tune`, against objectives whose best setting is known."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from shoal.bench.errors import BenchError
from shoal.bench.results.disturbance import TAKEN
from shoal.bench.tuning.report import sentences
from shoal.bench.tuning.search import MAX_ROUNDS, Budget, Found, Search
from shoal.bench.tuning.space import AXES, COARSE, FINE, Setting, Space
from shoal.bench.tuning.trial import Score, Status, Trial
from shoal.config import EngineConfig

Curve = Callable[[Setting], float]
PROMPT_TOKENS = 100_000
SPACE = Space(("continuous", "dynamic", "static"), 100, PROMPT_TOKENS)
TRIAL_SECONDS = 30.0


def peak(best: Setting, *, loss: float = 0.1) -> Curve:
    """A curve with its top at `best` that loses `loss` for each factor of two away from it."""

    def value(setting: Setting) -> float:
        distance = sum(
            abs(math.log2(getattr(setting, axis) / getattr(best, axis))) for axis in AXES
        )
        other = 0.0 if setting.scheduler == best.scheduler else 0.5
        return 100 * max(0.01, 1 - loss * distance - other)

    return value


@dataclass
class FakeObjective:
    """Measures a curve on a clock of its own, with noise; what can't reach its goal ends early."""

    curve: Curve
    noise: float = 0.0
    seed: int = 0
    fails: Callable[[Setting], bool] = lambda setting: False
    preempts: Callable[[Setting], bool] = lambda setting: False
    closeness: float = 0.05
    now: float = 0.0
    num_given_up: int = 0
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def measure(self, setting: Setting, to_reach: float | None, seconds: float) -> Trial:
        if self.fails(setting):
            self.now += 1
            return Trial(setting, Status.FAILED, 1, message="a prompt doesn't fit")
        value = self.curve(setting) * (1 + self.rng.uniform(-self.noise, self.noise))
        duration = TRIAL_SECONDS
        is_worse = to_reach is not None and value < to_reach
        if is_worse:
            duration *= value / to_reach
        self.now += min(duration, seconds)
        if duration > seconds:
            return Trial(setting, Status.OUT_OF_TIME, seconds)
        if is_worse:
            self.num_given_up += 1
            return Trial(setting, Status.WORSE, duration)
        figures = {"preemptions": 5} if self.preempts(setting) else {}
        return Trial(setting, Status.MEASURED, duration, Score(value), figures)

    def repeat(self, setting: Setting, best: Trial, seconds: float) -> Trial:
        return self.measure(setting, None, seconds)


def search(objective: FakeObjective, minutes: float = 60.0, space: Space = SPACE) -> Found:
    budget = Budget(minutes * 60, clock=lambda: objective.now)
    return Search(space, objective, budget, lambda what, spent: None).run()


def words(found: Found, space: Space = SPACE) -> str:
    return " ".join(sentences(found, space, EngineConfig(), None))


@pytest.mark.parametrize(
    "best",
    [
        Setting("continuous", 24, 256),
        Setting("continuous", 64, 2048),
        Setting("continuous", 8, 96),
        Setting("dynamic", 48, 4096),
        Setting("static", 64, 1024),
    ],
    ids=str,
)
def test_a_single_peak_is_found(best: Setting) -> None:
    # A peak elsewhere must be steep to be another strategy's, whose start is far from it.
    found = search(FakeObjective(peak(best, loss=0.04)))
    assert found.best.setting == best
    assert not found.unreached
    assert len(found.trials) < 40


@pytest.mark.parametrize("seed", range(10))
def test_noise_costs_little(seed: int) -> None:
    curve = peak(Setting("continuous", 12, 192))
    found = search(FakeObjective(curve, noise=0.02, seed=seed))
    assert curve(found.best.setting) >= 90
    assert found.gain > 0.2
    assert found.noise is not None
    assert found.gain > found.noise
    assert "beyond the noise" in words(found)


@pytest.mark.parametrize("seed", range(10))
def test_a_gain_of_the_size_of_the_noise_is_called_so(seed: int) -> None:
    found = search(FakeObjective(lambda setting: 100.0, noise=0.03, seed=seed))
    assert "beyond the noise" not in words(found)


def test_a_gain_that_is_not_there_in_each_round_is_doubted() -> None:
    found = search(FakeObjective(peak(Setting("continuous", 64, 512))))
    best, reference = found.best.setting, found.reference.setting
    for trials, value in zip(found.rounds, (300.0, 99.0, 300.0), strict=True):
        for setting in trials:
            trials[setting] = replace(trials[setting], score=Score(100.0))
        trials[best] = replace(trials[best], score=Score(value))
    assert best != reference
    assert "but -1.0% in the worst of 3 rounds" in words(found)
    assert "beyond the noise" not in words(found)


def test_a_single_round_is_told_beside_the_first_trials() -> None:
    found = search(FakeObjective(peak(Setting("continuous", 64, 512))))
    del found.rounds[1:]
    text = words(found)
    assert f"{found.gain:+.1%}, in a single round, {found.first_gain:+.1%} when they were" in text
    assert "the best once again" in text
    found.rounds.clear()
    assert "measured once: whether that is noise isn't known" in words(found)
    assert "tried, none again" in words(found)


def test_defaults_that_are_best_are_said_to_be() -> None:
    found = search(FakeObjective(peak(SPACE.start("continuous"))))
    assert found.best.setting == found.reference.setting
    assert found.gain == 0
    assert "Nothing tried is better than the defaults" in words(found)


def test_close_settings_are_measured_again_in_turns() -> None:
    found = search(FakeObjective(peak(Setting("continuous", 64, 512), loss=0.03), noise=0.01))
    assert len(found.rounds) == MAX_ROUNDS
    for trials in found.rounds:
        assert found.best.setting in trials
        assert found.reference.setting in trials


@pytest.mark.parametrize("minutes", [0.6, 1, 2, 5, 8])
def test_the_budget_is_kept_and_what_it_did_not_reach_is_told(minutes: float) -> None:
    objective = FakeObjective(peak(Setting("continuous", 4, 64)), noise=0.01)
    found = search(objective, minutes)
    assert objective.now <= minutes * 60
    assert found.unreached
    assert "the budget didn't reach" in words(found)


def test_a_short_budget_still_repeats_what_it_has_found() -> None:
    found = search(FakeObjective(peak(Setting("continuous", 8, 512))), minutes=5)
    assert found.best.setting != found.reference.setting
    assert found.rounds


def test_a_budget_too_short_for_one_trial_is_refused() -> None:
    with pytest.raises(BenchError, match="longer than the budget"):
        search(FakeObjective(peak(Setting("continuous", 8, 512))), minutes=0.3)


def test_settings_that_can_not_win_are_given_up() -> None:
    objective = FakeObjective(peak(Setting("continuous", 24, 256), loss=0.2))
    found = search(objective)
    assert objective.num_given_up > 5
    assert found.best.status is Status.MEASURED


def test_a_setting_that_fails_never_wins() -> None:
    best = Setting("continuous", 64, 512)
    objective = FakeObjective(peak(best), fails=lambda setting: setting == best)
    assert search(objective).best.setting != best


def test_if_every_setting_fails_the_reason_is_told() -> None:
    with pytest.raises(BenchError, match="a prompt doesn't fit"):
        search(FakeObjective(peak(Setting("static", 8, 512)), fails=lambda setting: True))


def test_if_nothing_does_what_is_wanted_the_defaults_stay() -> None:
    found = search(FakeObjective(lambda setting: 0.0))
    assert found.best is found.reference
    assert (found.gain, found.rounds) == (0, [])


def test_the_end_of_the_grid_is_told() -> None:
    space = Space(("continuous",), 1000, PROMPT_TOKENS)
    found = search(FakeObjective(lambda setting: setting.max_num_seqs), space=space)
    assert found.best.setting.max_num_seqs == 256
    assert "max_num_seqs" in found.edges
    assert "max_num_seqs 256 is the end of what is searched" in words(found, space)


def test_as_many_sequences_as_requests_are_told() -> None:
    found = search(FakeObjective(lambda setting: setting.max_num_seqs))
    assert found.best.setting.max_num_seqs == 96
    space = Space(("continuous",), 96, PROMPT_TOKENS)
    found = search(FakeObjective(lambda setting: setting.max_num_seqs), space=space)
    assert "max_num_seqs 96 holds all 96 requests" in words(found, space)


def test_an_edge_that_the_budget_made_is_told_as_one() -> None:
    space = Space(("continuous",), 1000, PROMPT_TOKENS)
    found = search(FakeObjective(lambda setting: setting.max_num_seqs), 4, space)
    assert "larger budget_minutes may find a better one" in words(found, space)


def test_preemptions_are_told_with_the_setting_that_limits() -> None:
    objective = FakeObjective(
        peak(Setting("continuous", 64, 512)), preempts=lambda setting: setting.max_num_seqs >= 64
    )
    assert "With 64 sequences and more, requests were preempted: the KV pool" in words(
        search(objective)
    )


def test_trials_that_were_disturbed_are_told() -> None:
    found = search(FakeObjective(peak(Setting("continuous", 64, 512))))
    assert "Other processes" not in words(found)
    found.trials[3].figures[TAKEN] = 0.4
    assert f"1 of 1 trials, up to 40% ({found.trials[3].setting})" in words(found)
    next(iter(found.rounds[0].values())).figures[TAKEN] = 0.5
    assert "during 2 of 2 trials" in words(found)
    assert "round 1)" in words(found)


def test_no_setting_has_fewer_tokens_than_sequences() -> None:
    setting = Setting("continuous", 64, 64)
    assert SPACE.neighbour(setting, "max_num_batched_tokens", -COARSE) is None
    assert SPACE.neighbour(setting, "max_num_seqs", COARSE) is None
    assert SPACE.neighbour(Setting("dynamic", 64, 1024), "max_num_batched_tokens", -1) is None


def test_the_defaults_are_on_the_grid() -> None:
    for strategy in SPACE.strategies:
        setting = SPACE.start(strategy)
        for axis in AXES:
            assert getattr(setting, axis) in SPACE.grid(setting, axis)


@pytest.mark.parametrize(
    ("num_requests", "expected"),
    [
        (20, (1, 2, 3, 4, 6, 8, 12, 16, 32)),  # 32, the default, holds all 20
        (32, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)),
        (48, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)),
        (100, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)),
    ],
)
def test_no_two_numbers_of_sequences_hold_all_requests(
    num_requests: int, expected: tuple[int, ...]
) -> None:
    space = Space(("continuous",), num_requests, PROMPT_TOKENS)
    assert space.grid(space.start("continuous"), "max_num_seqs") == expected


def test_no_two_budgets_hold_all_prompts() -> None:
    space = Space(("dynamic",), 48, 20_000)
    assert space.grid(space.start("dynamic"), "max_num_batched_tokens")[-2:] == (12288, 16384)
    space = Space(("dynamic",), 20, 5_000)  # the default, 16384, holds them
    assert space.grid(space.start("dynamic"), "max_num_batched_tokens")[-2:] == (4096, 16384)
    assert space.holds_all(space.start("dynamic"), "max_num_batched_tokens")


@pytest.mark.parametrize("num_requests", [1, 5, 20, 48, 200])
@pytest.mark.parametrize("num_prompt_tokens", [10, 300, 5_000, 1_000_000])
def test_every_setting_is_on_the_grid_of_its_neighbours(
    num_requests: int, num_prompt_tokens: int
) -> None:
    space = Space(SPACE.strategies, num_requests, num_prompt_tokens)
    for strategy in space.strategies:
        known = {space.start(strategy)}
        new = set(known)
        while new:
            neighbours = {
                space.neighbour(setting, axis, step)
                for setting in new
                for axis in AXES
                for step in (-COARSE, -FINE, FINE, COARSE)
            }
            new = {setting for setting in neighbours if setting is not None} - known
            known |= new
        for setting in known:
            setting.on(EngineConfig())  # which refuses what can't be
