"""Python runs this at its start when PYTHONPATH names its folder: faults for the engine's process.

`SHOAL_TEST_HOLD=PATH` keeps the engine from starting until the file is there.
`SHOAL_TEST_POISON=ID` makes every step fail that has a request with the token in its prompt.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

HOLD_SECONDS = 120


def hold_until(path: Path) -> None:
    deadline = time.monotonic() + HOLD_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit("held for too long")
        time.sleep(0.01)


def fail_on(token_id: int) -> None:
    from shoal.executor.native import NativeExecutor
    from shoal.scheduler.interface import ScheduledStep, StepResult

    execute = NativeExecutor.execute

    def execute_or_fail(self: NativeExecutor, step: ScheduledStep) -> StepResult:
        if any(token_id in row.request.prompt_token_ids for row in step.requests):
            raise ArithmeticError("poisoned")
        return execute(self, step)

    NativeExecutor.execute = execute_or_fail


if "shoal.engine.process" in sys.orig_argv:
    if path := os.environ.get("SHOAL_TEST_HOLD"):
        hold_until(Path(path))
    if poison := os.environ.get("SHOAL_TEST_POISON"):
        fail_on(int(poison))
