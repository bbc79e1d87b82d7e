"""Every setting of the engine: documented and validated once; the CLI flags come from it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

BLOCK_SIZE = 16

SchedulerName = Literal["continuous"]


class ConfigError(ValueError):
    """A setting is outside its range or contradicts another; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of an engine.

    Raises:
        ConfigError: a value is outside its range.
    """

    model: str = "smollm2-135m"
    """An alias, a path to a .gguf file, or hf:owner/name:file."""

    scheduler: SchedulerName = "continuous"
    """The batching strategy."""

    max_num_seqs: int = 32
    """Most requests in one step."""

    max_num_batched_tokens: int = 512
    """Most tokens in one step (the token budget)."""

    max_model_len: int | None = None
    """Most tokens of a request, prompt and output; the model's context when not set."""

    kv_cache_memory_mib: int = 1024
    """Size of the KV block pool in MiB."""

    enable_chunked_prefill: bool = True
    """Compute long prompts in pieces beside the running requests. Without it a prompt runs whole,
    and the first one of a step may pass the token budget."""

    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in a step; 0 for no limit below the token budget."""

    max_waiting_requests: int = 1024
    """Most requests in the queue; one more is refused with 429."""

    num_threads: int | None = None
    """Compute threads; what affinity and cgroup quota allow when not set."""

    seed: int | None = None
    """Makes the seeds drawn for requests without one repeatable."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "kv_cache_memory_mib",
            "max_waiting_requests",
        ):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(f"max_model_len must be at least 2, got {self.max_model_len}")
        if self.long_prefill_token_threshold < 0:
            raise ConfigError(
                "long_prefill_token_threshold must be 0 (no limit) or more, "
                f"got {self.long_prefill_token_threshold}"
            )
        if self.long_prefill_token_threshold > 0 and not self.enable_chunked_prefill:
            raise ConfigError(
                "long_prefill_token_threshold needs enable_chunked_prefill: "
                "it says how large the pieces of a long prompt are"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running request needs a token a step"
            )
        if self.num_threads is not None and not 1 <= self.num_threads <= (os.cpu_count() or 1) * 4:
            raise ConfigError(f"num_threads {self.num_threads} is not between 1 and 4 x the CPUs")
