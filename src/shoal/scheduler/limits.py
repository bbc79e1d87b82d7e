"""How long a request may be: the context of the model and the size of the KV pool."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.scheduler.interface import RequestRejectedError


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Most tokens of one request, prompt and output together.

    A sequence that reaches the smaller of the two limits ends with `FinishReason.LENGTH`. So a
    request that has the pool to itself never runs out of blocks.
    """

    max_model_len: int
    pool_tokens: int  # blocks * block_size

    @property
    def max_tokens(self) -> int:
        """Tokens at which a sequence ends, whatever its max_tokens."""
        return min(self.max_model_len, self.pool_tokens)

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Refuse a prompt that leaves no room for one token of output.

        Raises:
            RequestRejectedError: it never fits; the message names both numbers.
        """
        needed = num_prompt_tokens + 1
        if needed > self.max_model_len:
            raise RequestRejectedError(
                f"the prompt has {num_prompt_tokens} tokens and needs room for at least one more; "
                f"the context is {self.max_model_len} tokens"
            )
        if needed > self.pool_tokens:
            raise RequestRejectedError(
                f"the prompt has {num_prompt_tokens} tokens and needs room for at least one more; "
                f"the KV pool holds {self.pool_tokens} tokens (raise kv_cache_memory_mib)"
            )
