"""An executor without a model, for the tests of everything around it.

Its KV cache holds token ids. A token is a function of the sequence that it reads back through the
block table, so a wrong block table, a lost block or an incomplete recomputation changes the output.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence

from shoal.config import BLOCK_SIZE
from shoal.request import Request, TokenLogprob
from shoal.scheduler.interface import SampledToken, ScheduledRequest, ScheduledStep, StepResult

VOCAB_SIZE = 1000
_NOTHING = -1


def next_token(request: Request, sequence: list[int]) -> int:
    """What follows a sequence; depends on the seed, the sample and all of the sequence."""
    start = zlib.crc32(f"{request.seed} {request.sample_index}".encode())
    return zlib.crc32(array("i", sequence).tobytes(), start) % VOCAB_SIZE


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
        self._blocks = [[_NOTHING] * BLOCK_SIZE for _ in range(num_blocks)]
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

    def _write(self, scheduled: ScheduledRequest) -> None:
        for position, token_id in enumerate(scheduled.token_ids, scheduled.num_computed_tokens):
            block_id = scheduled.block_table[position // BLOCK_SIZE]
            self._blocks[block_id][position % BLOCK_SIZE] = token_id

    def _read(self, block_table: Sequence[int], end: int) -> list[int]:
        sequence: list[int] = []
        for block_id in block_table[: -(-end // BLOCK_SIZE)]:
            sequence += self._blocks[block_id]
        return sequence[:end]

    def _answer(self, scheduled: ScheduledRequest, result: StepResult) -> None:
        request = scheduled.request
        params = request.sampling_params
        end = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        sequence = self._read(scheduled.block_table, end)
        assert sequence == request.token_ids(0, end), "the KV cache holds another sequence"
        if params.prompt_logprobs is not None:
            first = scheduled.num_computed_tokens + 1
            last = min(end, request.num_prompt_tokens - 1)
            result.prompt_logprobs[request.request_id] = [
                TokenLogprob(request.prompt_token_ids[position], -float(position))
                for position in range(first, last + 1)
            ]
        if scheduled.sample:
            token_id = self._choose(request, sequence)
            logprob = TokenLogprob(token_id, -1.0) if params.logprobs is not None else None
            result.sampled[request.request_id] = SampledToken(token_id, logprob)
