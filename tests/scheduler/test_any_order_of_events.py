"""Whatever arrives, is aborted or fails, and when: the rules hold and everybody finishes.

SHOAL_FUZZ_STEPS sets how many steps are tried, SHOAL_FUZZ_SEED the first of the worlds.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from world import DURATIONS, StepFate, Strategy, World

STEPS = int(os.environ.get("SHOAL_FUZZ_STEPS", "100000"))
FIRST_SEED = int(os.environ.get("SHOAL_FUZZ_SEED", "0"))
SHARES: dict[Strategy, float] = {"static": 0.2, "dynamic": 0.25, "continuous": 0.55}

FATES: tuple[StepFate, ...] = (
    *("fine",) * 12,
    "one fails",
    "all fail",
    "nothing came back",
    "abort meanwhile",
)
SEEN_EVERYWHERE = {"cache hit", "queue full", "refused late", "cut", "late", "two prompts"}
SEEN: dict[Strategy, set[str]] = {
    "static": SEEN_EVERYWHERE | {"padding"},
    "dynamic": SEEN_EVERYWHERE | {"padding"},
    "continuous": SEEN_EVERYWHERE | {"preempted", "passed over"},
}


def live(world: World, rng: Random) -> None:
    """The life of a world: arrivals, steps, and now and then something else."""
    for _ in range(rng.randint(5, 30)):
        for _ in range(rng.choice([0, 1, 1, 4])):
            world.arrive(rng)
        for _ in range(rng.choice([1, 3, 10, 40])):
            if world.driver.scheduler.has_work():
                world.step(rng, rng.choice(FATES))
            world.pass_time(rng.choice(DURATIONS))
        match rng.randrange(12):
            case 0 | 1:
                world.abort(rng)
            case 2:
                world.reset_prefix_cache()
            case 3:
                world.end_input()
    world.drain(rng)


@pytest.mark.parametrize("strategy", SHARES)
def test_the_rules_hold_over_very_many_steps(strategy: Strategy) -> None:
    num_steps, seen = 0, Counter[str]()
    for seed in itertools.count(FIRST_SEED):
        rng = Random(f"{strategy} {seed}")
        world = World(rng, strategy)
        try:
            live(world, rng)
        except Exception as error:
            error.add_note(f"{strategy} world {seed}: {world.setting}")
            raise
        finally:
            world.close()
        num_steps += world.num_steps
        seen += world.seen  # drops what is zero
        if num_steps >= SHARES[strategy] * STEPS:
            break
    assert SEEN[strategy] <= seen.keys()


def test_very_many_are_a_hundred_thousand() -> None:
    assert STEPS >= 100_000 or "SHOAL_FUZZ_STEPS" in os.environ
    assert sum(SHARES.values()) == pytest.approx(1)


RANDOM = st.randoms(use_true_random=False)


class Life(RuleBasedStateMachine):
    """The same worlds in hypothesis' hands: fewer, but it shrinks what fails."""

    world: World

    @initialize(rng=RANDOM, strategy=st.sampled_from(list(SHARES)))
    def begin(self, rng: Random, strategy: Strategy) -> None:
        self.world = World(rng, strategy)

    @rule(rng=RANDOM)
    def arrive(self, rng: Random) -> None:
        self.world.arrive(rng)

    @rule(rng=RANDOM, count=st.integers(1, 20))
    def run(self, rng: Random, count: int) -> None:
        for _ in range(count):
            if self.world.driver.scheduler.has_work():
                self.world.step(rng)
            self.world.pass_time(1.0)

    @rule(rng=RANDOM, fate=st.sampled_from(FATES))
    def step(self, rng: Random, fate: StepFate) -> None:
        if self.world.driver.scheduler.has_work():
            self.world.step(rng, fate)

    @rule(rng=RANDOM)
    def abort(self, rng: Random) -> None:
        self.world.abort(rng)

    @rule()
    def reset_prefix_cache(self) -> None:
        self.world.reset_prefix_cache()

    @rule()
    def end_input(self) -> None:
        self.world.end_input()

    @rule(seconds=st.sampled_from([0.05, 3.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.drain(Random(0))
        finally:
            self.world.close()


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
