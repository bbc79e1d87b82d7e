"""What the golden file of the quality tests holds, and how a model is compared with it.

For each position of a few texts the file has the log-probabilities that HF transformers computes
in float32 for the dequantised model: those of the `NUM_TOP` most likely next tokens, and those of
`NUM_TAIL` tokens drawn, with replacement and in proportion to their probability, from the rest.
All 49,152 would be 500 MB.

The divergence KL(p || q) of p, the golden distribution, from q, the one compared, is the sum of
p (log p - log q) over all tokens. The likely tokens' share is summed. The rest's is its probability
times the mean of log p - log q over the drawn tokens: an unbiased estimate, in contrast to
lumping the rest together (a lower bound: some 10 % too low here). Over all positions the drawing
contributes about 1 % of the mean; `make_quality.py --measure` prints the exact sum beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.config import BLOCK_SIZE
from shoal.request import Request, SamplingParams
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep

GOLDEN = Path(__file__).parent / "golden" / "quality.npz"
NUM_TOP = 64
NUM_TAIL = 64
SEQUENCE_LENGTH = 512  # of each text; there are five

Floats = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class QualityGolden:
    """The arrays of the file; S sequences of T tokens each."""

    token_ids: npt.NDArray[np.int32]  # [S, T]
    top_ids: npt.NDArray[np.uint16]  # [S, T, NUM_TOP], most likely first
    top_logprobs: npt.NDArray[np.float32]  # [S, T, NUM_TOP]
    tail_ids: npt.NDArray[np.uint16]  # [S, T, NUM_TAIL]
    tail_logprobs: npt.NDArray[np.float32]  # [S, T, NUM_TAIL]
    logit_positions: npt.NDArray[np.int32]  # [S, 2]
    logits: npt.NDArray[np.float32]  # [S, 2, vocabulary]

    @staticmethod
    def load() -> QualityGolden:
        with np.load(GOLDEN) as file:
            return QualityGolden(
                **{field.name: file[field.name] for field in fields(QualityGolden)}
            )

    def save(self) -> None:
        np.savez_compressed(
            GOLDEN, **{field.name: getattr(self, field.name) for field in fields(self)}
        )

    def divergence(self, sequence: int, logits: Floats) -> Floats:
        """KL(golden || softmax(logits)) in nats at each position; `logits` is [T, vocabulary]."""
        normalizer = log_sum_exp(logits)
        top = self.top_logprobs[sequence].astype(np.float64)
        other_top = np.take_along_axis(logits, self.top_ids[sequence].astype(int), axis=1)
        likely = np.sum(np.exp(top) * (top - other_top + normalizer), axis=1)
        tail = self.tail_logprobs[sequence].astype(np.float64)
        other_tail = np.take_along_axis(logits, self.tail_ids[sequence].astype(int), axis=1)
        rest = 1 - np.exp(top).sum(axis=1)
        divergence: Floats = likely + rest * np.mean(tail - other_tail + normalizer, axis=1)
        return divergence

    def agreement(self, sequence: int, logits: Floats) -> npt.NDArray[np.bool_]:
        """Whether the most likely token is the golden one, at each position."""
        agreement: npt.NDArray[np.bool_] = logits.argmax(axis=1) == self.top_ids[sequence, :, 0]
        return agreement


def log_sum_exp(logits: Floats) -> Floats:
    """log(sum(exp(x))) of each row in float64, [rows, 1]; the exponentials keep their dtype."""
    largest = logits.max(axis=-1, keepdims=True)
    total = np.exp(logits - largest).sum(axis=-1, keepdims=True, dtype=np.float64)
    log_sum: Floats = largest + np.log(total)
    return log_sum


def log_softmax(logits: Floats) -> Floats:
    """In float64, over the last axis."""
    wide = logits.astype(np.float64)
    logprobs: Floats = wide - log_sum_exp(wide)
    return logprobs


def whole_sequence_step(token_ids: list[int]) -> ScheduledStep:
    """A step that computes all of one sequence, in the first blocks of the pool."""
    blocks = list(range(-(-len(token_ids) // BLOCK_SIZE)))
    request = Request("sequence", token_ids, SamplingParams(), max_tokens=1, seed=0)
    return ScheduledStep(0, [ScheduledRequest(request, token_ids, 0, blocks, sample=True)])
