"""The contract between a scheduler and the rest of the engine.

A scheduler is pure Python, deterministic and single-threaded, and takes the time as an argument,
so that the engine, the tests and a simulator drive the very same object.

What is made anew for each request of each step is a struct that the garbage collector doesn't look
at: none of them can be part of a cycle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from shoal.request import FinishReason, Request, TokenLogprob


class ScheduledRequest(msgspec.Struct, gc=False):
    """The share of one request in a step: compute `token_ids`, then sample if `sample`.

    `token_ids` stand at positions `num_computed_tokens` onwards. `block_table` holds the ids of
    the KV blocks of the whole sequence, enough for every position up to the last one computed.
    It is borrowed from the scheduler: read it during the step, don't keep it.
    """

    request: Request
    token_ids: list[int]
    num_computed_tokens: int
    block_table: Sequence[int]
    sample: bool
    is_padding: bool = False  # computed and thrown away: its request is done and keeps its row

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that this step computes for the request."""
        return len(self.token_ids)


class ScheduledStep(msgspec.Struct):
    """Everything that one step computes; the single contract with the executor.

    `ended` goes past the executor: the outputs of requests that ended while the step was made,
    because a time limit had passed. A step without requests says in `wake_time` when the scheduler
    wants to be asked again, if nothing comes before: None is at once, infinity never.
    """

    step_id: int
    requests: list[ScheduledRequest] = []
    preempted_request_ids: list[str] = []
    finished_request_ids: list[str] = []  # since the previous step
    num_slots: int = 0  # rows computed or reserved, and seats empty while requests wait
    ended: list[RequestOutput] = []
    wake_time: float | None = None

    @property
    def num_scheduled_tokens(self) -> int:
        """Tokens that the step computes over all its requests."""
        return sum([len(scheduled.token_ids) for scheduled in self.requests])


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """The token chosen for a request at the end of a step."""

    token_id: int
    logprob: TokenLogprob | None = None  # when the request asked for logprobs


class StepResult(msgspec.Struct):
    """What the executor computed.

    `sampled` has one entry for each scheduled request with `sample`, unless it is in `errors`.
    `prompt_logprobs` holds, for requests that asked, an entry for each prompt token whose
    log-probability this step computed: those at positions `num_computed_tokens + 1` onwards.
    """

    sampled: dict[str, SampledToken] = {}
    prompt_logprobs: dict[str, list[TokenLogprob]] = {}
    errors: dict[str, str] = {}


class RequestTimes(msgspec.Struct, frozen=True, array_like=True):
    """When a request passed its milestones (seconds, the engine's monotonic clock)."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one step (or an abort, or an error) brought for one request."""

    request_id: str
    new_token_ids: list[int] = []
    new_logprobs: Sequence[TokenLogprob] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token that ended it; not a part of the text
    stop_reason: str | None = None  # the time limit that ended it
    error: str | None = None
    retry_after: float | None = None  # with error: it was refused; seconds until to try again
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
    num_blocks_cached: int = 0  # that nobody holds, kept for prompts to come
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens
    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_slots: int = 0  # rows computed or reserved, and seats empty while requests waited
    num_useful_slots: int = 0  # of these, rows that produced a wanted token
    num_prefill_tokens: int = 0  # prompt tokens computed, again after a preemption

    @property
    def slot_utilization(self) -> float:
        """Share of the slots of all steps so far that produced a wanted token; 1 before any."""
        return self.num_useful_slots / self.num_slots if self.num_slots else 1.0


class RequestProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far one request is."""

    request_id: str
    arrival_time: float  # seconds, the engine's monotonic clock
    priority: int
    num_prompt_tokens: int
    num_computed_tokens: int  # of prompt and output
    num_output_tokens: int
    num_preemptions: int
    is_done: bool  # it has all its tokens and only keeps its place in its batch


class BatchView(msgspec.Struct, frozen=True):
    """Who runs and who waits at one moment, for people to look at."""

    running: list[RequestProgress]  # in the order of their arrival
    waiting: list[RequestProgress]  # the first ones, in the order in which they are served


class RequestRejectedError(Exception):
    """The request can't be served as it is (it never fits); the message names both numbers."""


class SchedulerInvariantError(Exception):
    """A scheduler broke one of its own rules, or its caller did; never the fault of a request."""


class QueueFullError(Exception):
    """The queue is at its limit; `retry_after` is the seconds after which to try again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TimeLimitError(QueueFullError):
    """A request reached one of its time limits before its first token."""


class Scheduler(Protocol):
    """A batching strategy: decides which requests run in a step, and how many tokens of each."""

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRejectedError: it can never fit the context or the KV pool.
            QueueFullError: max_waiting_requests is reached.
        """

    def end_input(self) -> None:
        """No request comes until those that wait are done: a batch need not wait to fill."""

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a request now and free its blocks; None when it is unknown or has ended."""

    def reset_prefix_cache(self) -> int:
        """Forget all cached blocks; returns how many. Running requests keep theirs."""

    def schedule(self, now: float) -> ScheduledStep:
        """Decide the next step; a step without requests means that nothing can run yet."""

    def update(self, step: ScheduledStep, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what the executor computed; returns an output for each request that advanced."""

    def has_work(self) -> bool:
        """Whether any request waits or runs."""

    def stats(self) -> SchedulerStats:
        """A snapshot for the metrics."""

    def view_batch(self, max_waiting: int) -> BatchView:
        """Who runs, and the first `max_waiting` of those who wait."""
