import os
from pathlib import Path

import pytest

from shoal.bench.results.machine import Machine


def test_the_machine_is_described():
    machine = Machine.this()
    assert machine.cpu
    assert machine.cpus == len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0
    assert machine.python.startswith("3.")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="the flags are read from there")
def test_only_instruction_sets_that_the_cpu_has_are_named():
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert set(Machine.this().instruction_sets) <= flags
