"""Drives a scheduler with the fake executor, a step and a second at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_executor import FakeExecutor

from shoal.config import EngineConfig
from shoal.kv.manager import KVCacheManager
from shoal.request import FinishReason, Request, RequestStatus, SamplingParams
from shoal.scheduler.continuous import ContinuousScheduler
from shoal.scheduler.interface import RequestOutput, ScheduledStep

MAX_STEPS = 20_000


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int = 1000,
    *,
    arrival_time: float = 0.0,
    priority: int = 0,
    eos_token_ids: tuple[int, ...] = (),
    **params: Any,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=[
            (7 * len(request_id) + position) % 1000 for position in range(num_prompt_tokens)
        ],
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=sum(map(ord, request_id)),
        eos_token_ids=eos_token_ids,
        priority=priority,
        arrival_time=arrival_time,
    )


@dataclass
class Driver:
    """A scheduler over `num_blocks` blocks of 16 tokens, an executor, and what came out."""

    num_blocks: int = 100
    max_model_len: int = 10_000
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.kv_cache = KVCacheManager(self.num_blocks)
        self.scheduler = ContinuousScheduler(
            EngineConfig(**self.settings), self.kv_cache, self.max_model_len
        )
        self.executor = FakeExecutor(self.num_blocks)
        self.requests: dict[str, Request] = {}
        self.finished: dict[str, RequestOutput] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id, self.now)
        if output is not None:
            self._note(output)

    def step(self, fail: int | None = None) -> ScheduledStep:
        """One step; the fake executor checks that the KV cache holds the right tokens.

        With `fail` one of the step's requests, counted round, ends with an error.
        """
        step = self.scheduler.schedule(self.now)
        result = self.executor.execute(step)
        if fail is not None:
            failed = step.requests[fail % len(step.requests)].request.request_id
            result.sampled.pop(failed, None)
            result.errors[failed] = "it failed"
        for output in self.scheduler.update(step, result, self.now):
            self._note(output)
        self.now += 1.0
        return step

    def step_until(self, is_over: Callable[[ScheduledStep], bool]) -> ScheduledStep:
        """Step until `is_over(step)`; returns that step."""
        for _ in range(MAX_STEPS):
            if is_over(step := self.step()):
                return step
        raise AssertionError(f"not over after {MAX_STEPS} steps")

    def run(self) -> None:
        """Step until everything has finished; every step must compute something."""
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work():
                break
            assert self.step().requests, "a step without progress"
        assert not self.scheduler.has_work(), f"not finished after {MAX_STEPS} steps"
        assert self.kv_cache.num_used_blocks == 0, "blocks are held at idle"

    def tokens_of(self, request_id: str) -> list[int]:
        return self.requests[request_id].output_token_ids

    def running(self) -> set[str]:
        return {
            name
            for name, request in self.requests.items()
            if request.status is RequestStatus.RUNNING
        }

    def _note(self, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            assert output.request_id not in self.finished, "finished twice"
            self.finished[output.request_id] = output

    def reason_of(self, request_id: str) -> FinishReason | None:
        return self.finished[request_id].finish_reason


def shares(step: ScheduledStep) -> dict[str, int]:
    """Tokens of each request in the step."""
    return {s.request.request_id: s.num_scheduled_tokens for s in step.requests}
