"""How much of the machine others had while something was measured: its figures then mislead.

From the kernel's counters of what the CPUs did (Linux: /proc/stat), without what this process and
its children used. They count in hundredths of a second: a share over less than a second is rough.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from shoal.bench.results.report import Figures

TAKEN, STOLEN = "cpu_taken_share", "cpu_steal_share"
"""Names of figures: shares of the time of the CPUs that this process may run on, which others had;
and the part of it that the host of a virtual machine gave to other machines."""

MAX_TAKEN_SHARE = 0.05  # more than that, and ratios are off by as much

_STAT = Path("/proc/stat")
_IDLE, _IOWAIT, _STEAL, _GUEST = 3, 4, 7, 8  # places of the counters behind a CPU's name


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Seconds until now: of the clock, and of CPU time over `num_cpus`.

    `busy` is what all processes and the kernel used, `stolen` what the host of a virtual machine
    gave to others, `own` what this process and those of its children that have ended used.
    """

    time: float
    busy: float
    stolen: float
    own: float
    num_cpus: int

    @classmethod
    def now(cls, stat: Path = _STAT) -> CpuReading | None:
        """Read the counters; None where the system has none."""
        if not stat.exists():
            return None
        counters = _counters(stat.read_text(), os.sched_getaffinity(0))
        if not counters:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        columns = [sum(column) / ticks for column in zip(*counters, strict=True)]
        waiting = columns[_IDLE] + columns[_IOWAIT]
        own = os.times()
        return cls(
            time=time.monotonic(),
            busy=sum(columns) - waiting - columns[_STEAL],
            stolen=columns[_STEAL],
            own=own.user + own.system + own.children_user + own.children_system,
            num_cpus=len(counters),
        )

    def figures_since(self, start: CpuReading) -> Figures:
        """The shares that others had since `start`; none where the counters don't tell."""
        seconds = (self.time - start.time) * self.num_cpus
        busy, own, stolen = self.busy - start.busy, self.own - start.own, self.stolen - start.stolen
        if seconds <= 0 or busy <= 0 < own:  # a sandbox whose counters stand still
            return {}
        taken = max(0.0, busy - own) + stolen
        return {TAKEN: min(1.0, taken / seconds), STOLEN: min(1.0, stolen / seconds)}


@dataclass(slots=True)
class CpuWatch:
    """Watches the CPUs from its making on. Children count once they have ended."""

    _start: CpuReading | None = field(default_factory=CpuReading.now)

    def figures(self) -> Figures:
        """`TAKEN` and `STOLEN` until now; none where the system doesn't tell."""
        now = CpuReading.now()
        return {} if now is None or self._start is None else now.figures_since(self._start)


def is_disturbed(figures: Figures) -> bool:
    """Whether others had so much of the machine that the figures may mislead."""
    return figures.get(TAKEN, 0.0) > MAX_TAKEN_SHARE


def warnings_on(figures: Mapping[str, Figures], what: str) -> list[str]:
    """A sentence if others had much of the machine; none if not, or if nobody knows.

    Args:
        figures: those of each measurement by its name.
        what: what the measurements are, in the plural.
    """
    shares = {name: of_one[TAKEN] for name, of_one in figures.items() if TAKEN in of_one}
    disturbed = [name for name in shares if is_disturbed(figures[name])]
    if not disturbed:
        return []
    worst = max(disturbed, key=lambda name: shares[name])
    return [
        f"Other processes had more than {MAX_TAKEN_SHARE:.0%} of the CPUs during {len(disturbed)} "
        f"of {len(shares)} {what}, up to {shares[worst]:.0%} ({worst}): ratios mislead. Measure "
        "again when the machine is quiet."
    ]


def _counters(text: str, cpus: set[int]) -> list[list[int]]:
    """The counters of each of the CPUs, but for those of guests, whose time is in others too."""
    names = {f"cpu{cpu}" for cpu in cpus}
    rows = (line.partition(" ") for line in text.splitlines())
    return [list(map(int, row.split()[:_GUEST])) for name, _, row in rows if name in names]
