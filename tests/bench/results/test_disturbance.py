"""A measurement says how much of the machine others had meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.bench.results.disturbance import STOLEN, TAKEN, CpuReading, CpuWatch, warnings_on

START = CpuReading(time=100.0, busy=500.0, stolen=3.0, own=50.0, num_cpus=4)


def after(seconds: float, **used: float) -> dict[str, float]:
    """The figures `seconds` after the start, in which so much CPU time was used."""
    totals = {name: getattr(START, name) + value for name, value in used.items()}
    return replace(START, time=START.time + seconds, **totals).figures_since(START)


def test_a_quiet_machine_has_nothing_taken() -> None:
    assert after(10.0, busy=38.0, own=38.0) == {TAKEN: 0.0, STOLEN: 0.0}


def test_what_others_used_and_what_the_host_took_counts() -> None:
    figures = after(10.0, busy=36.0, own=30.0, stolen=2.0)
    assert figures == pytest.approx({TAKEN: 0.2, STOLEN: 0.05})


def test_own_time_that_the_counters_round_off_is_no_gift() -> None:
    assert after(10.0, busy=30.0, own=30.1)[TAKEN] == 0.0


def test_counters_that_stand_still_tell_nothing() -> None:
    assert after(10.0, own=38.0) == {}


def test_the_counters_of_the_own_cpus_are_read(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    (tmp_path / "stat").write_text(
        "cpu  9999 9999 9999 9999 9999 9999 9999 9999 9999 9999\n"
        f"cpu{cpu} 1000 200 300 4000 500 60 70 80 900 90\n"
        "cpu4096 7 7 7 7 7 7 7 7 7 7\n"
        "intr 1 2 3\n"
    )
    reading = CpuReading.now(tmp_path / "stat")
    assert reading is not None
    ticks = os.sysconf("SC_CLK_TCK")
    assert reading.busy * ticks == pytest.approx(1000 + 200 + 300 + 60 + 70)
    assert (reading.stolen * ticks, reading.num_cpus) == (80, 1)


def test_a_system_without_counters_tells_nothing(tmp_path: Path) -> None:
    assert CpuReading.now(tmp_path / "stat") is None
    assert CpuWatch(None).figures() == {}


def test_what_children_used_is_no_disturbance() -> None:
    spin = "import time\nend = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    own, before = os.times(), CpuReading.now()
    subprocess.run([sys.executable, "-c", spin], check=True)
    after, now = CpuReading.now(), os.times()
    assert before is not None
    assert after is not None
    children = sum(now[2:4]) - sum(own[2:4])
    assert children >= 0.4
    clock_tick = 0.01  # the resolution of all of these
    assert after.own - before.own >= children - clock_tick


def test_others_are_seen() -> None:
    """A child that goes on is one of the others, for nobody knows yet what it used."""
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        watch = CpuWatch()
        time.sleep(1.0)
        assert watch.figures()[TAKEN] > 0.1 / len(os.sched_getaffinity(0))
    finally:
        child.kill()
        child.wait()


def test_the_warning_names_the_worst_and_counts_the_others() -> None:
    figures = {
        "static, all at once": {TAKEN: 0.04},
        "static, 70% load": {TAKEN: 0.3},
        "continuous, 70% load": {TAKEN: 0.1},
        "dynamic, 70% load": {},
    }
    assert warnings_on(figures, "runs") == [
        "Other processes had more than 5% of the CPUs during 2 of 3 runs, up to 30% "
        "(static, 70% load): ratios mislead. Measure again when the machine is quiet."
    ]


def test_a_quiet_machine_needs_no_warning() -> None:
    assert warnings_on({"a": {TAKEN: 0.05}, "b": {}}, "runs") == []
