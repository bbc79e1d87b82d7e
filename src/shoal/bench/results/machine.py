"""What a figure was measured on: a number without its machine can't be compared."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

_RELEVANT_FLAGS = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The computer under this process."""

    cpu: str
    instruction_sets: tuple[str, ...]  # those that matter to the kernels
    cpus: int  # that this process may run on
    memory_gib: float
    system: str
    python: str

    @classmethod
    def this(cls) -> Machine:
        """Describe the machine that runs this process; fields that the system hides are empty."""
        model, flags = _cpu_info(Path("/proc/cpuinfo"))
        return cls(
            cpu=model or platform.processor() or platform.machine(),
            instruction_sets=tuple(flag for flag in _RELEVANT_FLAGS if flag in flags),
            cpus=_num_cpus(),
            memory_gib=_memory_gib(),
            system=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
        )


def _cpu_info(path: Path) -> tuple[str, frozenset[str]]:
    """The first CPU's model name and flags; empty where there is no such file (not Linux)."""
    if not path.exists():
        return "", frozenset()
    fields: dict[str, str] = {}
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    return fields.get("model name", ""), frozenset(fields.get("flags", "").split())


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
