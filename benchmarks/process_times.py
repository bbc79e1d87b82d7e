"""CPU time and memory out of /proc: of processes, and of the whole machine (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def machine_seconds() -> float:
    """CPU seconds that all processes of the machine have used since it started."""
    user, nice, system, _idle, _iowait, irq, softirq = map(
        int, Path("/proc/stat").read_text().split(maxsplit=8)[1:8]
    )
    return (user + nice + system + irq + softirq) / TICKS_PER_SECOND


def tree_seconds(pid: int) -> float:
    """CPU seconds that a process, its ended children and its living descendants have used."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            # The name, in parentheses, may contain spaces; the fields are counted after it.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        children.setdefault(int(fields[1]), []).append(int(entry.name))
        seconds[int(entry.name)] = sum(map(int, fields[11:15])) / TICKS_PER_SECOND
    total, waiting = 0.0, [pid]
    while waiting:
        process = waiting.pop()
        total += seconds.get(process, 0.0)
        waiting += children.get(process, [])
    return total


def tree_of(pid: int) -> list[int]:
    """A process and its living descendants."""
    tree = [pid]
    for process in tree:  # grows meanwhile
        for task in Path(f"/proc/{process}/task").iterdir():
            tree += map(int, (task / "children").read_text().split())
    return tree


def resident_bytes(pid: int) -> int:
    """Memory that a process holds; pages that it shares with others count in full."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
