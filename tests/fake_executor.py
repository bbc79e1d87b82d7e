"""An executor without a model, for the tests of everything around it.

Its KV cache holds token ids. A token is a function of the sequence that it reads back through the
block table, so a wrong block table, a lost block or an incomplete recomputation changes the output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

from shoal.config import BLOCK_SIZE
from shoal.request import Request, TokenLogprob
from shoal.scheduler.interface import SampledToken, ScheduledRequest, ScheduledStep, StepResult

VOCAB_SIZE = 1000


def next_token(request: Request, sequence: list[int]) -> int:
    """What follows a sequence; depends on the seed, the sample and all of the sequence."""
    key = repr((request.seed, request.sample_index, sequence)).encode()
    return zlib.crc32(key) % VOCAB_SIZE


class FakeExecutor:
    """Writes tokens into blocks, reads them back, answers with `choose(request, sequence)`."""

    num_threads = 1
    isa = "none"

    def __init__(
        self,
        num_blocks: int,
        choose: Callable[[Request, list[int]], int] = next_token,
    ) -> None:
        self.num_blocks = num_blocks
        self._choose = choose
        self._slots: list[int | None] = [None] * (num_blocks * BLOCK_SIZE)
        self.steps: list[ScheduledStep] = []
        self.closed = False

    def execute(self, step: ScheduledStep) -> StepResult:
        self.steps.append(step)
        result = StepResult()
        for scheduled in step.requests:
            self._write(scheduled)
        for scheduled in step.requests:
            self._answer(scheduled, result)
        return result

    def close(self) -> None:
        self.closed = True

    def _slot(self, scheduled: ScheduledRequest, position: int) -> int:
        block_id = scheduled.block_table[position // BLOCK_SIZE]
        return block_id * BLOCK_SIZE + position % BLOCK_SIZE

    def _write(self, scheduled: ScheduledRequest) -> None:
        for offset, token_id in enumerate(scheduled.token_ids):
            self._slots[self._slot(scheduled, scheduled.num_computed_tokens + offset)] = token_id

    def _answer(self, scheduled: ScheduledRequest, result: StepResult) -> None:
        request = scheduled.request
        params = request.sampling_params
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        sequence = [self._slots[self._slot(scheduled, position)] for position in range(end)]
        assert sequence == request.token_ids(0, end), "the KV cache holds another sequence"
        if params.prompt_logprobs is not None:
            first = scheduled.num_computed_tokens + 1
            last = min(end, request.num_prompt_tokens - 1)
            result.prompt_logprobs[request.request_id] = [
                TokenLogprob(request.prompt_token_ids[position], -float(position))
                for position in range(first, last + 1)
            ]
        if scheduled.sample:
            token_id = self._choose(request, request.token_ids(0, end))
            logprob = TokenLogprob(token_id, -1.0) if params.logprobs is not None else None
            result.sampled[request.request_id] = SampledToken(token_id, logprob)
