"""How many threads may compute: what affinity, cgroup CPU quota and cpuset allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_V1_QUOTA = "cpu.cfs_quota_us"
_V1_PERIOD = "cpu.cfs_period_us"
_V2_QUOTA = "cpu.max"
_CPUSETS = ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus")


@dataclass(frozen=True, slots=True)
class SystemPaths:
    """Where the system describes a process's limits."""

    membership: Path = Path("/proc/self/cgroup")
    cgroups: Path = Path("/sys/fs/cgroup")


def available_threads(paths: SystemPaths | None = None, affinity: int | None = None) -> int:
    """Threads that can run at the same time: floor(min(affinity, quota, cpuset)), at least 1.

    A quota or cpuset of any cgroup on the way to the root counts, in version 1 and 2 of cgroups
    (Linux, Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/). `paths` and `affinity` replace
    the system's own.
    """
    limits = [float(_affinity() if affinity is None else affinity)]
    for group in _groups(paths or SystemPaths()):
        limits += _quota(group)
        limits += _cpuset(group)
    return max(1, math.floor(min(limits)))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _groups(paths: SystemPaths) -> Iterator[Path]:
    """The directories of the process's cgroups and of all above them.

    A container often sees its own group at the root, under a path that does not exist there;
    missing directories hold no limit.
    """
    for line in (_read(paths.membership) or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        for mount in _mounts(paths.cgroups, controllers):
            parts = [part for part in group.split("/") if part not in ("", ".", "..")]
            for depth in range(len(parts), -1, -1):
                yield mount.joinpath(*parts[:depth])


def _mounts(root: Path, controllers: str) -> list[Path]:
    """Where the hierarchy is mounted: version 2 names no controllers."""
    if not controllers:
        return [root, root / "unified"]
    if {"cpu", "cpuset"}.isdisjoint(controllers.split(",")):
        return []
    return [root / name for name in {controllers, *controllers.split(",")}]


def _quota(group: Path) -> list[float]:
    """CPUs that the group may use on average; empty without a limit."""
    if (line := _read(group / _V2_QUOTA)) is not None:
        quota, _, period = line.partition(" ")
        return _ratio(quota, period or "100000")
    return _ratio(_read(group / _V1_QUOTA), _read(group / _V1_PERIOD))


def _ratio(quota: str | None, period: str | None) -> list[float]:
    """Empty for a missing value, "max" (version 2) and -1 (version 1), which mean no limit."""
    try:
        quota_us, period_us = int(quota or ""), int(period or "")
    except ValueError:
        return []
    return [quota_us / period_us] if quota_us > 0 and period_us > 0 else []


def _cpuset(group: Path) -> list[float]:
    for name in _CPUSETS:
        if count := _count_cpus(_read(group / name) or ""):
            return [float(count)]
    return []


def _count_cpus(cpus: str) -> int:
    """The number of CPUs in a list such as "0-3,8"; 0 when it is empty or not understood."""
    count = 0
    try:
        for span in filter(None, cpus.split(",")):
            first, _, last = span.partition("-")
            count += int(last or first) - int(first) + 1
    except ValueError:
        return 0
    return count


def _read(path: Path) -> str | None:
    """The text of a file; None where the kernel offers none, which means no limit."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return None
