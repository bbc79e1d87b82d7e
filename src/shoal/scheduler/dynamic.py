"""Dynamic (request-level) batching: whole batches, formed by size, tokens or waiting time.

As in Triton Inference Server's dynamic batcher: a batch starts when it is full, when it has one of
the preferred sizes, or when its oldest request has waited for `max_queue_delay`.
"""

from __future__ import annotations

from shoal.scheduler.batch import BatchScheduler

MAX_PREFILL_TOKENS = 512
"""Most prompt tokens of one step of a batch. Larger steps are no faster, and between steps the
engine sees who has hung up."""


class DynamicScheduler(BatchScheduler):
    """Starts a batch when it is full or its oldest request has waited long enough.

    Full is: `max_num_seqs` requests, `max_num_batched_tokens` prompt tokens (one longer prompt runs
    alone), or what the KV pool holds. Before that, a batch of one of the `preferred_batch_sizes`
    starts at once, the largest that there are requests for.
    """

    def _num_to_start(self, now: float) -> int:
        num_in_budget, has_reached_budget = self._num_in_budget()
        count = min(self._num_that_fit(), num_in_budget)
        if has_reached_budget or self._is_full(count) or self._has_waited_enough(now):
            return count
        return max((n for n in self._config.preferred_batch_sizes if n <= count), default=0)

    def _max_prefill_tokens(self) -> int:
        return min(self._config.token_budget, MAX_PREFILL_TOKENS)

    def _num_in_budget(self) -> tuple[int, bool]:
        """Waiting requests, in their order, within the token budget; and whether they use it up.

        It is at least one, however long its prompt is.
        """
        num_tokens = 0
        for count, request in enumerate(self._waiting):
            num_tokens += request.num_prompt_tokens
            if num_tokens > self._config.token_budget:
                return max(count, 1), True
        return len(self._waiting), num_tokens == self._config.token_budget
