"""The contract between a scheduler and the rest of the engine.

A scheduler is pure Python, deterministic and single-threaded, and takes the time as an argument,
so that the engine, the tests and a simulator drive the very same object.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from shoal.request import FinishReason, Request, TokenLogprob


@dataclass(slots=True)
class ScheduledRequest:
    """The share of one request in a step: compute `token_ids`, then sample if `sample`.

    `token_ids` stand at positions `num_computed_tokens` onwards. `block_table` holds the ids of
    the KV blocks of the whole sequence, enough for every position up to the last one computed.
    It is borrowed from the scheduler: read it during the step, don't keep it.
    """

    request: Request
    token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]
    sample: bool

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that this step computes for the request."""
        return len(self.token_ids)


@dataclass(slots=True)
class ScheduledStep:
    """Everything that one step computes; the single contract with the executor."""

    step_id: int
    requests: list[ScheduledRequest] = field(default_factory=list)
    preempted_request_ids: list[str] = field(default_factory=list)
    finished_request_ids: list[str] = field(default_factory=list)  # since the previous step

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes over all its requests."""
        return sum(len(scheduled.token_ids) for scheduled in self.requests)


class SampledToken(msgspec.Struct, frozen=True):
    """The token chosen for a request at the end of a step."""

    token_id: int
    logprob: TokenLogprob | None = None  # when the request asked for logprobs


@dataclass(slots=True)
class StepResult:
    """What the executor computed.

    `sampled` has one entry for each scheduled request with `sample`, unless it is in `errors`.
    `prompt_logprobs` holds, for requests that asked, an entry for each prompt token whose
    log-probability this step computed: those at positions `num_computed_tokens + 1` onwards.
    """

    sampled: dict[str, SampledToken] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """When a request passed its milestones (seconds, the engine's monotonic clock)."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step (or an abort, or an error) brought for one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it; not a part of the text
    error: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    times: RequestTimes | None = None  # set with the first token and with finish_reason


class SchedulerStats(msgspec.Struct, frozen=True):
    """A snapshot for the metrics; counters are totals since the start."""

    num_requests_running: int
    num_requests_waiting: int
    num_blocks_total: int
    num_blocks_used: int
    num_preemptions: int
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens


class RequestRejectedError(Exception):
    """The request can't be served as it is (it never fits); the message names both numbers."""


class SchedulerInvariantError(Exception):
    """A scheduler broke one of its own rules, or its caller did; never the fault of a request."""


class QueueFullError(Exception):
    """The queue is at its limit; `retry_after` is the seconds after which to try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Scheduler(Protocol):
    """A batching strategy: decides which requests run in a step, and how many tokens of each."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRejectedError: it can never fit the context or the KV pool.
            QueueFullError: max_waiting_requests is reached.
        """

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a request now and free its blocks; None when it is unknown or has ended."""

    def schedule(self, now: float) -> ScheduledStep:
        """Decide the next step; a step without requests means that nothing can run yet."""

    def update(self, step: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what the executor computed; returns an output for each request that advanced."""

    def has_work(self) -> bool:
        """Whether any request waits or runs."""

    def stats(self) -> SchedulerStats:
        """A snapshot for the metrics."""
