"""What the engine asks of the thing that computes."""

from __future__ import annotations

from typing import Protocol

from shoal.scheduler.interface import ScheduledStep, StepResult


class Executor(Protocol):
    """Runs the model's program for a scheduled step.

    A row's arithmetic depends on that row and its own KV alone, so that results are bit-identical
    however requests are batched. Sampling state is kept by request id from the first step of a
    request until a step names it in `finished_request_ids`.
    """

    num_blocks: int  # KV blocks of `block_size` tokens in the pool

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute one step: one ragged forward pass, then sampling."""

    def close(self) -> None:
        """Stop the threads and release the memory."""
