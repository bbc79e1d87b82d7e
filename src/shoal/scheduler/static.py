"""Static batching: wait for a whole batch, compute it to its end, then take the next."""

from __future__ import annotations

from shoal.scheduler.batch import BatchScheduler


class StaticScheduler(BatchScheduler):
    """Starts a batch when `max_num_seqs` requests wait, or as many as the KV pool holds.

    A smaller one starts only when the input has ended, as it does offline, or when its oldest
    request has waited for `max_queue_delay`, if that is set.
    """

    def _num_to_start(self, now: float) -> int:
        count = self._num_that_fit()
        return count if self._is_full(count) or self._has_waited_enough(now) else 0
