"""A scheduler in a world where anything may happen at any time, drawn from a random generator.

The generator is an ordinary seeded one where many steps are wanted, and hypothesis' own where a
failure should shrink.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import pytest
from driving import Driver, make_request
from invariants import Ledger, StepCheck, check_answer, check_request_limits

from shoal.request import Request, RequestStatus
from shoal.scheduler import continuous
from shoal.scheduler.interface import (
    QueueFullError,
    RequestRejectedError,
    ScheduledStep,
    StepResult,
)

Strategy = Literal["static", "dynamic", "continuous"]
StepFate = Literal["fine", "one fails", "all fail", "nothing came back", "abort meanwhile"]

MAX_STEPS_TO_DRAIN = 20_000
STOP_TOKEN_IDS = tuple(range(0, 1000, 20))
TIME_LIMITS = (0.0, 0.5, 3.0, 40.0)
DURATIONS = (0.0, 0.05, 1.0, 1.0, 1.0, 20.0)


@dataclass(frozen=True)
class Setting:
    """Of one world: the engine's settings, and what they are about."""

    engine: dict[str, Any]
    num_blocks: int
    max_model_len: int
    watermark: int
    max_bypasses: int
    shares_prefixes: bool
    has_time_limits: bool

    @classmethod
    def draw(cls, rng: Random, strategy: Strategy) -> Setting:
        max_num_seqs = rng.randint(1, 6)
        draw_own = {
            "static": _draw_static,
            "dynamic": _draw_dynamic,
            "continuous": _draw_continuous,
        }[strategy]
        has_time_limits = rng.random() < 0.4
        engine = {
            "scheduler": strategy,
            "max_num_seqs": max_num_seqs,
            "max_waiting_requests": rng.choice([max_num_seqs + 2, 12]),
            "queue_timeout_action": rng.choice(["reject", "delay"]),
            **draw_own(rng, max_num_seqs),
        }
        return cls(
            engine=engine,
            num_blocks=rng.randint(2, 20),
            max_model_len=rng.choice([rng.randint(8, 300), 1000]),
            watermark=rng.choice([0, continuous.WATERMARK_BLOCKS]),
            max_bypasses=rng.choice([1, 3, continuous.MAX_BYPASSES]),
            shares_prefixes=rng.random() < 0.7,
            has_time_limits=has_time_limits,
        )


def _draw_static(rng: Random, max_num_seqs: int) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": max_num_seqs + rng.randint(0, 60),
        "skip_padding": rng.random() < 0.5,
        "max_queue_delay": rng.choice([None, 0.0, 2.5, 60.0]),
    }


def _draw_dynamic(rng: Random, max_num_seqs: int) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": rng.choice([None, rng.randint(1, 200)]),
        "skip_padding": rng.random() < 0.5,
        "max_queue_delay": rng.choice([None, 0.0, 2.5, 60.0, math.inf]),
        "preferred_batch_sizes": tuple(
            rng.sample(range(1, max_num_seqs + 1), rng.randint(0, min(2, max_num_seqs)))
        ),
    }


def _draw_continuous(rng: Random, max_num_seqs: int) -> dict[str, Any]:
    is_chunked = rng.random() < 0.7
    return {
        "max_num_batched_tokens": max_num_seqs + rng.randint(0, 60),
        "enable_chunked_prefill": is_chunked,
        "long_prefill_token_threshold": rng.choice([0, rng.randint(1, 20)]) if is_chunked else 0,
        "max_num_prefill_tokens": rng.choice([None, rng.randint(1, 40)]),
        "enable_priority_preemption": rng.random() < 0.5,
    }


class World:
    """Lets things happen to a scheduler and checks it after each; close it at the end."""

    def __init__(self, rng: Random, strategy: Strategy) -> None:
        self.setting = Setting.draw(rng, strategy)
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(continuous, "WATERMARK_BLOCKS", self.setting.watermark)
        self._patch.setattr(continuous, "MAX_BYPASSES", self.setting.max_bypasses)
        self.driver = Driver(
            num_blocks=self.setting.num_blocks,
            max_model_len=self.setting.max_model_len,
            settings=self.setting.engine,
        )
        self.ledger = Ledger()
        self.num_steps = 0
        self.seen: Counter[str] = Counter()  # what has happened of its own accord, how often
        self._num_questions = 0

    def close(self) -> None:
        self._patch.undo()

    # What may happen

    def arrive(self, rng: Random) -> None:
        """A question arrives, of one or more samples: all are taken, or none."""
        added: list[str] = []
        for request in self._draw_question(rng):
            waiting = self.driver.scheduler.stats().num_requests_waiting
            try:
                self.driver.add(request)
            except RequestRejectedError:
                assert not check_request_limits(self.driver, request)
                assert not added
            except QueueFullError as refusal:
                assert waiting >= self.setting.engine["max_waiting_requests"]
                self._note_refusal(refusal)
                for request_id in added:
                    self.driver.abort(request_id)
                return
            else:
                assert check_request_limits(self.driver, request)
                added.append(request.request_id)

    def abort(self, rng: Random) -> None:
        """A client hangs up, perhaps one whose answer is complete."""
        if self.driver.requests:
            self.driver.abort(rng.choice(list(self.driver.requests)))

    def reset_prefix_cache(self) -> None:
        self.driver.scheduler.reset_prefix_cache()
        assert self.driver.kv_cache.num_cached_blocks == 0

    def end_input(self) -> None:
        self.driver.scheduler.end_input()

    def pass_time(self, seconds: float) -> None:
        self.driver.now += seconds

    def step(self, rng: Random, fate: StepFate = "fine") -> ScheduledStep:
        """One step, and what becomes of it."""
        driver = self.driver
        check = StepCheck.before(driver, self.ledger)
        step = driver.schedule()
        check.after(step)
        self._check_blocks()
        self.num_steps += 1
        self._note(step)
        if step.requests:
            self._finish(step, rng, fate)
            self._check_blocks()
        driver.executor.steps.clear()
        return step

    def drain(self, rng: Random) -> None:
        """Nobody comes any more: all that are here must end."""
        self.driver.scheduler.end_input()
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.driver.scheduler.has_work():
                break
            self.step(rng)
            self.pass_time(0.05)
        assert not self.driver.scheduler.has_work(), f"steps go on after {MAX_STEPS_TO_DRAIN}"
        self.driver.check_idle()
        assert set(self.driver.finished) == set(self.driver.requests)
        for request in self.driver.requests.values():
            check_answer(self.driver, request)
        stats = self.driver.scheduler.stats()
        self.seen["preempted"] = stats.num_preemptions
        self.seen["cache hit"] = stats.prefix_cache_hits

    # How it happens

    def _note_refusal(self, refusal: QueueFullError) -> None:
        self.seen["queue full"] += 1
        assert 1.0 <= refusal.retry_after <= 120.0

    def _note(self, step: ScheduledStep) -> None:
        self.seen["padding"] += sum(row.is_padding for row in step.requests)
        self.seen["two prompts"] += sum(row.num_scheduled_tokens > 1 for row in step.requests) > 1
        for request in self.driver.requests.values():
            self.seen["passed over"] += request.num_bypasses > 0
            self.seen["late"] += request.late_since is not None
        for output in step.ended:
            self.seen["refused late"] += output.retry_after is not None
            self.seen["cut"] += output.stop_reason is not None

    def _finish(self, step: ScheduledStep, rng: Random, fate: StepFate) -> None:
        driver = self.driver
        ids = [scheduled.request.request_id for scheduled in step.requests]
        if fate == "all fail":  # as the engine does when the executor raises
            driver.update(step, StepResult(errors=dict.fromkeys(ids, "it failed")))
            return
        result = driver.executor.execute(step)
        if fate == "one fails":
            failed = rng.choice(ids)
            result.sampled.pop(failed, None)
            result.errors[failed] = "it failed"
        elif fate == "nothing came back":
            result.sampled.pop(rng.choice(ids), None)
        elif fate == "abort meanwhile":
            driver.abort(rng.choice(ids))
        driver.now += rng.choice(DURATIONS)
        driver.update(step, result)

    def _check_blocks(self) -> None:
        self.driver.kv_cache.check()
        for request in self.driver.requests.values():
            if request.status is not RequestStatus.RUNNING:
                assert not self.driver.kv_cache.block_table(request)

    def _draw_question(self, rng: Random) -> list[Request]:
        self._num_questions += 1
        name = str(self._num_questions)
        num_samples = rng.choice([1, 1, 1, 2, 3])
        scope = self._draw_scope(rng, name, num_samples)
        prompt = self._draw_prompt(rng)
        max_tokens = rng.choice([1, rng.randint(1, 20), rng.randint(20, 120)])
        fields: dict[str, Any] = {
            "priority": rng.choice([0, 0, -1, 1, 2]),
            "stop_token_ids": STOP_TOKEN_IDS if rng.random() < 0.3 else (),
            "logprobs": rng.choice([None, None, 0]),
            "cache_scope": scope,
            "arrival_time": self.driver.now,
        }
        if self.setting.has_time_limits:
            fields["max_queue_time"] = rng.choice([None, *TIME_LIMITS])
            fields["max_total_time"] = rng.choice([None, None, *TIME_LIMITS])
        prompt_logprobs = rng.choice([None, None, None, 0])
        return [
            make_request(
                f"{name}.{index}",
                len(prompt),
                max_tokens,
                prompt=list(prompt),
                sample_index=index,
                prompt_logprobs=prompt_logprobs if index == 0 else None,
                **fields,
            )
            for index in range(num_samples)
        ]

    def _draw_scope(self, rng: Random, name: str, num_samples: int) -> tuple[str, str] | None:
        if self.setting.shares_prefixes and rng.random() < 0.8:
            return ("salt", rng.choice(["", "", "", "b"]))
        return ("request", name) if num_samples > 1 else None

    def _draw_prompt(self, rng: Random) -> list[int]:
        """One of few beginnings, of any length, then something of its own."""
        if not self.setting.shares_prefixes:
            return [rng.randrange(1000) for _ in range(rng.choice([1, 5, 20, 60, 200]))]
        family = rng.choice([1, 1, 2])
        shared = [family * position % 1000 for position in range(rng.choice([0, 15, 16, 33, 64]))]
        own = [rng.randrange(1000) for _ in range(rng.choice([0, 1, 2, 16, 50, 200]))]
        return shared + own or [family]
