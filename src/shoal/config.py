"""Every setting of the engine: documented and validated once; the CLI flags come from it."""

from __future__ import annotations

import dataclasses
import math
import os
from dataclasses import dataclass
from typing import Any, Literal, get_args

BLOCK_SIZE = 16

SchedulerName = Literal["static", "dynamic", "continuous"]
QueueTimeoutAction = Literal["reject", "delay"]
InstructionSet = Literal["portable", "avx2", "avx512", "amx"]

_DEFAULT_TOKEN_BUDGETS: dict[SchedulerName, int] = {
    "static": 512,
    "dynamic": 16384,
    "continuous": 512,
}
_DEFAULT_QUEUE_DELAYS: dict[SchedulerName, float] = {"static": math.inf, "dynamic": 0.05}
_SERVED_STATIC_DELAY = 1.0

_SWITCHES = (
    "enable_prefix_caching",
    "skip_padding",
    "enable_chunked_prefill",
    "enable_priority_preemption",
)

# The settings that only some strategies have; others refuse them.
_SETTINGS_OF: dict[str, tuple[SchedulerName, ...]] = {
    "max_queue_delay": ("static", "dynamic"),
    "skip_padding": ("static", "dynamic"),
    "preferred_batch_sizes": ("dynamic",),
    "enable_chunked_prefill": ("continuous",),
    "long_prefill_token_threshold": ("continuous",),
    "max_num_prefill_tokens": ("continuous",),
    "enable_priority_preemption": ("continuous",),
}


class ConfigError(ValueError):
    """A setting is outside its range or contradicts another; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Raises:
        ConfigError: a value is outside its range, or the strategy has no such setting.
    """

    model: str = "smollm2-135m"
    """An alias, a path to a .gguf file, or hf:owner/name:file."""

    scheduler: SchedulerName = "continuous"
    """The batching strategy."""

    max_num_seqs: int = 32
    """Most requests in one step."""

    max_num_batched_tokens: int | None = None
    """The token budget: most tokens in one step (512 when not set); dynamic: most prompt tokens in
    one batch (16384 when not set)."""

    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; the model's context when not set."""

    kv_cache_memory_mib: int = 1024
    """Size of the KV block pool in MiB."""

    enable_prefix_caching: bool = True
    """Keep the KV blocks of ended requests, and start a prompt behind the blocks that are there."""

    max_queue_delay: float | None = None
    """Static, dynamic: seconds that a batch waits to fill, from the enqueueing of its oldest
    request; 0 never waits. When not set: 0.05 for dynamic; static waits until the batch is full or
    the input ends, which a server can't see and takes to be after 1 second."""

    preferred_batch_sizes: tuple[int, ...] = ()
    """Dynamic: sizes at which a batch starts before it is full, may be repeated."""

    skip_padding: bool = False
    """Static, dynamic: don't compute the rows of finished requests until their batch ends."""

    enable_chunked_prefill: bool = True
    """Continuous: compute long prompts in pieces beside the running requests. Without it a prompt
    runs whole, and the first one of a step may pass the token budget."""

    long_prefill_token_threshold: int = 0
    """Continuous: most tokens of one prompt in a step; 0 for no limit below the token budget."""

    max_num_prefill_tokens: int | None = None
    """Continuous: most prompt tokens in a step beside the decoding requests; the token budget when
    not set."""

    enable_priority_preemption: bool = False
    """Continuous: let a waiting request take the seat and blocks of a running one of lower
    priority."""

    max_waiting_requests: int = 1024
    """Most requests in the queue; one more is refused with 429."""

    max_queue_time: float | None = None
    """Seconds that a request may wait to be started; what then happens says
    queue_timeout_action."""

    queue_timeout_action: QueueTimeoutAction = "reject"
    """Refuse a request that has waited max_queue_time (429), or let it wait on behind those that
    wait then."""

    max_total_time: float | None = None
    """Seconds from arrival after which a request ends with the tokens that it has."""

    num_threads: int | None = None
    """Compute threads; what affinity and cgroup quota allow when not set."""

    instruction_set: InstructionSet | None = None
    """What the kernels use; the best that the processor has when not set. avx512 decodes one
    request at a time faster than amx, which is faster at prompts and with more requests."""

    seed: int | None = None
    """Makes the seeds drawn for requests without one repeatable."""

    trace_file: str | None = None
    """File for a trace of steps and requests, to be opened with Perfetto or chrome://tracing."""

    @property
    def token_budget(self) -> int:
        """max_num_batched_tokens, or the strategy's default."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return _DEFAULT_TOKEN_BUDGETS[self.scheduler]

    @property
    def queue_delay(self) -> float:
        """max_queue_delay, or the default of a strategy that has one (seconds; may be inf)."""
        if self.max_queue_delay is not None:
            return self.max_queue_delay
        return _DEFAULT_QUEUE_DELAYS[self.scheduler]

    def for_serving(self) -> EngineConfig:
        """These settings where requests come over a network, which never says that it has ended."""
        if self.scheduler == "static" and self.max_queue_delay is None:
            return dataclasses.replace(self, max_queue_delay=_SERVED_STATIC_DELAY)
        return self

    def __post_init__(self) -> None:
        self._check_strategy()
        self._check_ranges()
        if self.long_prefill_token_threshold > 0 and not self.enable_chunked_prefill:
            raise ConfigError(
                "long_prefill_token_threshold needs enable_chunked_prefill: "
                "it says how large the pieces of a long prompt are"
            )
        if self.scheduler != "dynamic" and self.token_budget < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.token_budget}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running request needs a token a step"
            )
        if self.scheduler != "continuous" and self.max_waiting_requests < self.max_num_seqs:
            raise ConfigError(
                f"max_waiting_requests ({self.max_waiting_requests}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): a batch could never fill"
            )

    def _check_ranges(self) -> None:
        for name, low in (
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("kv_cache_memory_mib", 1),
            ("max_num_prefill_tokens", 1),
            ("max_waiting_requests", 1),
            ("max_model_len", 2),
            ("long_prefill_token_threshold", 0),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if type(value) is not int or value < low:
                raise ConfigError(f"{name} must be a whole number of at least {low}, got {value}")
        if self.max_queue_delay is not None and not self.max_queue_delay >= 0:  # NaN too
            raise ConfigError(f"max_queue_delay must be 0 or more, got {self.max_queue_delay}")
        for name in ("max_queue_time", "max_total_time"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0:
                raise ConfigError(f"{name} must be above 0 seconds, got {seconds}")
        for name in _SWITCHES:
            if type(value := getattr(self, name)) is not bool:
                raise ConfigError(f"{name} must be True or False, got {value!r}")
        if self.num_threads is not None and not 1 <= self.num_threads <= (os.cpu_count() or 1) * 4:
            raise ConfigError(f"num_threads {self.num_threads} is not between 1 and 4 x the CPUs")

    def _check_strategy(self) -> None:
        for name, choices in (
            ("scheduler", get_args(SchedulerName)),
            ("queue_timeout_action", get_args(QueueTimeoutAction)),
            ("instruction_set", (None, *get_args(InstructionSet))),
        ):
            if (value := getattr(self, name)) not in choices:
                names = ", ".join(map(str, choices))
                raise ConfigError(f"{name} must be one of {names}, got {value!r}")
        for name, strategies in _SETTINGS_OF.items():
            if self.scheduler not in strategies and getattr(self, name) != _default(name):
                raise ConfigError(
                    f"{name} is a setting of {' and '.join(strategies)} batching, "
                    f"the scheduler is {self.scheduler}"
                )
        for size in self.preferred_batch_sizes:
            if not 1 <= size <= self.max_num_seqs:
                raise ConfigError(
                    f"preferred_batch_sizes has {size}, "
                    f"they must be between 1 and max_num_seqs ({self.max_num_seqs})"
                )


def _default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(EngineConfig) if field.name == name)
