"""What an engine did, step by step: the part of a run that no client sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class RowKind(StrEnum):
    """What a step computed for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    PADDING = "padding"


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: when it ran, its rows by request id, and how full it was.

    Times are seconds after the start of the run.
    """

    start: float
    end: float
    rows: dict[str, RowKind]
    num_tokens: int
    num_slots: int
    num_useful_slots: int  # rows that produced a wanted token
    num_blocks_used: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """The steps of a run. `queue_times` are seconds from arrival to the first step, a request."""

    steps: Sequence[StepRecord]
    queue_times: Sequence[float]
    num_blocks: int  # of the KV pool
    num_preemptions: int

    @property
    def slot_utilization(self) -> float:
        """Share of the slots of all steps that produced a wanted token; 1 without a step."""
        num_slots = sum(step.num_slots for step in self.steps)
        useful = sum(step.num_useful_slots for step in self.steps)
        return useful / num_slots if num_slots else 1.0

    @property
    def kv_usage(self) -> list[float]:
        """Share of the KV blocks in use after each step."""
        return [step.num_blocks_used / self.num_blocks for step in self.steps]
