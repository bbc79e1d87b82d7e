"""What the dashboard remembers of the last minutes."""

from __future__ import annotations

import pytest

from shoal.scheduler.interface import SchedulerStats
from shoal.server.recent import (
    INTERVAL,
    MAX_SAMPLES,
    UTILIZATION_INTERVALS,
    WINDOW,
    RecentLatencies,
    RecentSteps,
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Steps:
    """Steps that each compute prompt tokens and output tokens on slots."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.recent = RecentSteps(self.clock)
        self.totals = {"num_prefill_tokens": 0, "num_useful_slots": 0, "num_slots": 0}

    def step(self, prompt: int = 0, output: int = 0, slots: int = 0) -> None:
        for name, value in zip(self.totals, (prompt, output, slots), strict=True):
            self.totals[name] += value
        self.recent.observe(SchedulerStats(1, 0, 8, 1, 0, **self.totals))


def test_the_rate_is_that_of_the_last_seconds_and_falls_to_nothing() -> None:
    steps = Steps()
    for _ in range(100):  # two intervals and an eighth of one more
        steps.clock.now += 0.0425
        steps.step(prompt=17, output=4)
    throughput = steps.recent.throughput()
    assert throughput.prompt == pytest.approx(17 / 0.0425, rel=0.02)
    assert throughput.output == pytest.approx(4 / 0.0425, rel=0.02)
    steps.clock.now += 3 * INTERVAL
    assert (steps.recent.throughput().prompt, steps.recent.throughput().output) == (0, 0)


def test_the_history_has_a_point_for_each_interval_also_for_those_without_steps() -> None:
    steps = Steps()
    steps.step(output=10)
    steps.clock.now += 4 * INTERVAL
    steps.step(output=30)
    steps.clock.now += INTERVAL
    history = steps.recent.throughput().output_history
    assert len(history) == WINDOW / INTERVAL - 1
    assert history[-5:] == [10 / INTERVAL, 0, 0, 0, 30 / INTERVAL]
    steps.clock.now += WINDOW
    assert not any(steps.recent.throughput().output_history)


def test_the_slot_utilization_is_that_of_the_last_minute() -> None:
    steps = Steps()
    assert steps.recent.slot_utilization() is None
    steps.step(output=1, slots=10)
    steps.clock.now += INTERVAL
    steps.step(output=8, slots=10)
    assert steps.recent.slot_utilization() == 9 / 20
    steps.clock.now += (UTILIZATION_INTERVALS - 1) * INTERVAL
    assert steps.recent.slot_utilization() == 8 / 10
    steps.clock.now += INTERVAL
    assert steps.recent.slot_utilization() is None


def test_percentiles_are_interpolated_between_ranks() -> None:
    latencies = RecentLatencies(Clock())
    assert latencies.percentiles() is None
    for seconds in (0.4, 0.1, 0.3, 0.2, 0.5):
        latencies.observe(seconds)
    percentiles = latencies.percentiles()
    assert percentiles is not None
    assert percentiles.p50 == pytest.approx(0.3)
    assert percentiles.p90 == pytest.approx(0.46)
    assert percentiles.p99 == pytest.approx(0.496)
    assert percentiles.count == 5


def test_old_latencies_and_those_beyond_the_bound_are_forgotten() -> None:
    clock = Clock()
    latencies = RecentLatencies(clock)
    latencies.observe(9.0)
    clock.now += WINDOW + 1
    latencies.observe(1.0)
    percentiles = latencies.percentiles()
    assert percentiles is not None
    assert (percentiles.p99, percentiles.count) == (1.0, 1)
    for _ in range(MAX_SAMPLES + 10):
        latencies.observe(2.0)
    percentiles = latencies.percentiles()
    assert percentiles is not None
    assert (percentiles.p50, percentiles.count) == (2.0, MAX_SAMPLES)
