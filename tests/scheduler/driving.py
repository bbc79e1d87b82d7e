"""Drives a scheduler with the fake executor, a step and a second at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fake_executor import FakeExecutor

from shoal.config import EngineConfig
from shoal.kv.manager import KVCacheManager
from shoal.request import FinishReason, Request, RequestStatus, SamplingParams
from shoal.scheduler.continuous import ContinuousScheduler
from shoal.scheduler.dynamic import DynamicScheduler
from shoal.scheduler.interface import RequestOutput, ScheduledStep, StepResult
from shoal.scheduler.static import StaticScheduler

MAX_STEPS = 20_000
SCHEDULERS = {
    "static": StaticScheduler,
    "dynamic": DynamicScheduler,
    "continuous": ContinuousScheduler,
}


def make_request(
    request_id: str,
    num_prompt_tokens: int,
    max_tokens: int = 1000,
    *,
    prompt: list[int] | None = None,
    **fields: Any,
) -> Request:
    """A request with these fields, or SamplingParams.

    The prompts of all requests whose names are of one length begin alike.
    """
    params = {
        name: fields.pop(name) for name in fields.keys() & set(SamplingParams.__struct_fields__)
    }
    if prompt is None:
        first = 7 * len(request_id)
        prompt = [(first + position) % 1000 for position in range(num_prompt_tokens)]
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        max_tokens=max_tokens,
        seed=sum(map(ord, request_id)),
        **fields,
    )


@dataclass
class Driver:
    """A scheduler over `num_blocks` blocks of 16 tokens, an executor, and what came out."""

    num_blocks: int = 100
    max_model_len: int = 10_000
    settings: dict[str, Any] = field(default_factory=dict)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.config = EngineConfig(**self.settings)
        self.kv_cache = KVCacheManager(self.num_blocks)
        self.scheduler = SCHEDULERS[self.config.scheduler](
            self.config, self.kv_cache, self.max_model_len
        )
        self.executor = FakeExecutor(self.num_blocks)
        self.requests: dict[str, Request] = {}
        self.outputs: list[RequestOutput] = []
        self.finished: dict[str, RequestOutput] = {}
        self.finish_times: dict[str, float] = {}

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests[request.request_id] = request

    def arrive(self, *args: Any, **kwargs: Any) -> Request:
        """Add a request that arrives now; the arguments are those of `make_request`."""
        request = make_request(*args, arrival_time=self.now, **kwargs)
        self.add(request)
        return request

    def abort(self, request_id: str) -> None:
        output = self.scheduler.abort(request_id, self.now)
        if output is not None:
            self._note(output)

    def step(self, seconds: float = 1.0) -> ScheduledStep:
        """One step, which takes so long; the fake executor checks that the KV cache is right."""
        step = self.schedule()
        if step.requests:
            self.update(step, self.executor.execute(step))
        self.now += seconds
        return step

    def schedule(self) -> ScheduledStep:
        step = self.scheduler.schedule(self.now)
        for output in step.ended:
            self._note(output)
        return step

    def update(self, step: ScheduledStep, result: StepResult) -> None:
        for output in self.scheduler.update(step, result, self.now):
            self._note(output)

    def step_until(self, is_over: Callable[[ScheduledStep], bool]) -> ScheduledStep:
        """Step until `is_over(step)`; returns that step."""
        for _ in range(MAX_STEPS):
            if is_over(step := self.step()):
                return step
        raise AssertionError(f"not over after {MAX_STEPS} steps")

    def run(self) -> None:
        """Step until everything has finished; every step must compute something.

        Where a batch waits to fill, the time it waits for passes.
        """
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_work():
                break
            step = self.step(seconds=0.0)
            if step.requests or step.ended:
                self.now += 1.0 if step.requests else 0.0
                continue
            assert step.wake_time is not None, "a step without progress"
            assert self.now < step.wake_time < math.inf, "a step without progress"
            self.now = step.wake_time
        assert not self.scheduler.has_work(), f"not finished after {MAX_STEPS} steps"
        self.check_idle()

    def check_idle(self) -> None:
        """Nobody holds a block, and none is lost."""
        self.kv_cache.check()
        assert self.kv_cache.num_used_blocks == 0, "blocks are held at idle"
        assert self.kv_cache.num_free_blocks == self.kv_cache.num_blocks

    def tokens_of(self, request_id: str) -> list[int]:
        """The tokens that were handed out for a request."""
        return [
            token_id
            for output in self.outputs
            if output.request_id == request_id
            for token_id in output.new_token_ids
        ]

    def running(self) -> set[str]:
        return {
            name
            for name, request in self.requests.items()
            if request.status is RequestStatus.RUNNING
        }

    def _note(self, output: RequestOutput) -> None:
        assert output.request_id not in self.finished, "an output after the last"
        self.outputs.append(output)
        if output.finish_reason is not None:
            self.finished[output.request_id] = output
            self.finish_times[output.request_id] = self.now

    def reason_of(self, request_id: str) -> FinishReason | None:
        return self.finished[request_id].finish_reason


def shares(step: ScheduledStep) -> dict[str, int]:
    """Tokens of each request in the step."""
    return {s.request.request_id: s.num_scheduled_tokens for s in step.requests}
