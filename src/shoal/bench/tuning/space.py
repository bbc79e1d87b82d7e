"""The settings that a search may try: a geometric grid for each strategy."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.config import EngineConfig, SchedulerName

Axis = Literal["max_num_seqs", "max_num_batched_tokens"]
AXES: tuple[Axis, ...] = ("max_num_seqs", "max_num_batched_tokens")
COARSE, FINE = 2, 1  # steps on the grid: a factor of 2; a third or a half more

Grid = tuple[int, ...]


def _geometric(low: int, high: int) -> Grid:
    """Powers of two and the values halfway: 1, 2, 3, 4, 6, 8, 12, ..."""
    powers = [2**exponent for exponent in range(high.bit_length() + 1)]
    values = sorted({*powers, *(power + power // 2 for power in powers)})
    return tuple(value for value in values if low <= value <= high)


_SEQS = _geometric(1, 256)
_TOKENS: dict[SchedulerName, Grid] = {
    "static": _geometric(32, 4096),
    "dynamic": _geometric(1024, 65536),  # prompt tokens of a whole batch
    "continuous": _geometric(32, 4096),
}


@dataclass(frozen=True, slots=True, order=True)
class Setting:
    """One point: a strategy and its limits."""

    scheduler: SchedulerName
    max_num_seqs: int
    max_num_batched_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.scheduler}, {self.max_num_seqs} sequences, {self.max_num_batched_tokens} tokens"
        )

    def on(self, config: EngineConfig) -> EngineConfig:
        """`config` with this setting."""
        return dataclasses.replace(
            config,
            scheduler=self.scheduler,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
        )


@dataclass(frozen=True, slots=True)
class Space:
    """The grid of the settings that a run can tell apart.

    More sequences than there are requests can't be told from as many, nor a budget of more tokens
    than all prompts have from one for all: of such values the grid has one.

    Args:
        strategies: those to try, the one to begin with first.
        num_requests: how many a run has.
        num_prompt_tokens: how many all of its prompts have.
    """

    strategies: Sequence[SchedulerName]
    num_requests: int
    num_prompt_tokens: int

    def start(self, strategy: SchedulerName) -> Setting:
        """The strategy's defaults."""
        default = EngineConfig(scheduler=strategy)
        return Setting(strategy, default.max_num_seqs, default.token_budget)

    def grid(self, setting: Setting, axis: Axis) -> Grid:
        """The values that `axis` may have, the other limit being as it is."""
        default = getattr(self.start(setting.scheduler), axis)
        needs_token_each = setting.scheduler != "dynamic"  # as EngineConfig checks
        if axis == "max_num_batched_tokens":
            values = _distinct(_TOKENS[setting.scheduler], self.num_prompt_tokens, default)
            lowest = setting.max_num_seqs if needs_token_each else 1
            return tuple(n for n in values if n >= lowest)
        values = _distinct(_SEQS, self.num_requests, default)
        highest = setting.max_num_batched_tokens if needs_token_each else math.inf
        return tuple(n for n in values if n <= highest)

    def holds_all(self, setting: Setting, axis: Axis) -> bool:
        """Whether a larger value of `axis` could not be told from the one that it has."""
        if axis == "max_num_seqs":
            return setting.max_num_seqs >= self.num_requests
        return setting.max_num_batched_tokens >= self.num_prompt_tokens

    def neighbour(self, setting: Setting, axis: Axis, step: int) -> Setting | None:
        """The setting `step` places further on the axis; None beyond the end of the grid."""
        grid = self.grid(setting, axis)
        place = grid.index(getattr(setting, axis)) + step
        return _with(setting, axis, grid[place]) if 0 <= place < len(grid) else None


def _distinct(values: Grid, enough: int, default: int) -> Grid:
    """The values below `enough`, and for all others the default or, if that is less, `enough`."""
    return tuple(n for n in values if n < enough or n == max(enough, default))


def _with(setting: Setting, axis: Axis, value: int) -> Setting:
    if axis == "max_num_seqs":
        return dataclasses.replace(setting, max_num_seqs=value)
    return dataclasses.replace(setting, max_num_batched_tokens=value)
