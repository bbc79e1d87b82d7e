"""The program of a model in plain NumPy: the oracle that the tests compare executors with.

It computes what the op definitions in `shoal.model.program` say, one op after the other, with
dequantised weights and no regard for speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.config import BLOCK_SIZE
from shoal.model.program import (
    Add,
    Attention,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    Op,
    Program,
    RmsNorm,
    Rope,
    SelectRows,
    View,
)
from shoal.model.quantization import dequantize
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep

Array = npt.NDArray[Any]  # of the executor's dtype
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The rows of one request in the batch, and where its keys and values lie."""

    rows: slice
    positions: Indices  # [rows]
    slots: Indices  # [positions so far]: block_id * BLOCK_SIZE + offset of each position


@dataclass(frozen=True, slots=True)
class _Batch:
    """A ragged batch: the rows of all requests one after the other."""

    token_ids: Indices  # [rows]
    positions: Indices  # [rows]
    sequences: list[_Sequence]
    logit_rows: Indices  # rows that need logits
    buffers: dict[str, Array]


class ReferenceExecutor:
    """Computes logits for scheduled steps in float32 or float64.

    The KV cache has `num_blocks` blocks and persists from step to step. The angles of the rotary
    embedding are the program's float32 ones in either dtype.
    """

    def __init__(
        self,
        program: Program,
        num_blocks: int,
        dtype: type[np.float32] | type[np.float64] = np.float32,
    ) -> None:
        self.num_blocks = num_blocks
        self._program = program
        self._dtype = dtype
        self._weights = {
            name: dequantize(weight).astype(dtype, copy=False)
            for name, weight in program.weights.items()
        }
        self._rope_cos = program.rope_cos.astype(dtype, copy=False)
        self._rope_sin = program.rope_sin.astype(dtype, copy=False)
        slots = (program.num_layers, num_blocks * BLOCK_SIZE)
        self._keys = np.zeros((*slots, program.num_kv_heads, program.head_dim), dtype)
        self._values = np.zeros_like(self._keys)

    def logits(self, step: ScheduledStep, *, all_rows: bool = False) -> dict[str, Array]:
        """Compute `step`; returns logits [rows, vocab_size] by request id.

        The rows are the last one of each request with `sample`, or with `all_rows` every row of
        every request.
        """
        batch, owners = self._prepare(step, all_rows)
        *body, last = self._program.ops
        for op in body:
            self._run(op, batch)
        if not isinstance(last, Logits):
            raise TypeError(f"a program ends with Logits, not {type(last).__name__}")
        logits = self._read(batch, last.x) @ self._weights[last.weight].T
        return {request_id: logits[rows] for request_id, rows in owners.items()}

    def _prepare(self, step: ScheduledStep, all_rows: bool) -> tuple[_Batch, dict[str, slice]]:
        """The batch, and which of its logits belong to which request."""
        token_ids: list[int] = []
        logit_rows: list[int] = []
        sequences: list[_Sequence] = []
        owners: dict[str, slice] = {}
        for scheduled in step.requests:
            rows = slice(len(token_ids), len(token_ids) + scheduled.num_scheduled_tokens)
            token_ids += scheduled.token_ids
            sequences.append(_sequence(scheduled, rows))
            wanted = range(rows.start, rows.stop) if all_rows else [rows.stop - 1]
            if all_rows or scheduled.sample:
                owner = slice(len(logit_rows), len(logit_rows) + len(wanted))
                owners[scheduled.request.request_id] = owner
                logit_rows += wanted
        batch = _Batch(
            token_ids=np.array(token_ids, np.int64),
            positions=np.concatenate([sequence.positions for sequence in sequences]),
            sequences=sequences,
            logit_rows=np.array(logit_rows, np.int64),
            buffers={},
        )
        return batch, owners

    def _run(self, op: Op, batch: _Batch) -> None:
        match op:
            case Embed(out, weight):
                self._write(batch, out, self._weights[weight][batch.token_ids])
            case RmsNorm():
                self._rms_norm(op, batch)
            case Linear():
                self._linear(op, batch)
            case Rope():
                self._rope(op, batch)
            case Attention():
                attended = [self._attend(op, batch, sequence) for sequence in batch.sequences]
                self._write(batch, op.out, np.concatenate(attended))
            case GatedActivation(gate, up, out):
                x = self._read(batch, gate)
                self._write(batch, out, x / (1 + np.exp(-x)) * self._read(batch, up))
            case Add(x, y):
                self._write(batch, x, self._read(batch, x) + self._read(batch, y))
            case SelectRows(x, out):
                self._write(batch, out, self._read(batch, x)[batch.logit_rows])
            case Logits():
                raise TypeError("Logits must be the last op of a program")

    def _read(self, batch: _Batch, view: View) -> Array:
        return batch.buffers[view.buffer][:, view.start : view.start + view.width]

    def _write(self, batch: _Batch, view: View, values: Array) -> None:
        buffer = batch.buffers.get(view.buffer)
        if buffer is None or len(buffer) != len(values):  # fewer rows follow a SelectRows
            shape = (len(values), self._program.buffers[view.buffer])
            buffer = batch.buffers[view.buffer] = np.zeros(shape, self._dtype)
        buffer[:, view.start : view.start + view.width] = values

    def _rms_norm(self, op: RmsNorm, batch: _Batch) -> None:
        x = self._read(batch, op.x)
        mean_square = np.mean(x * x, axis=1, keepdims=True)
        norm = np.sqrt(mean_square + self._dtype(op.epsilon))
        self._write(batch, op.out, x / norm * self._weights[op.weight])

    def _linear(self, op: Linear, batch: _Batch) -> None:
        x = self._read(batch, op.x)
        parts: list[Array] = []
        for weight, bias in zip(op.weights, op.biases, strict=True):
            product = x @ self._weights[weight].T
            parts.append(product if bias is None else product + self._weights[bias])
        self._write(batch, op.out, np.concatenate(parts, axis=1))

    def _rope(self, op: Rope, batch: _Batch) -> None:
        x = self._read(batch, op.x).reshape(-1, op.num_heads, op.head_dim)
        rotated = x.copy()
        half = op.rotary_dim // 2
        first = slice(0, op.rotary_dim, 2) if op.interleaved else slice(0, half)
        second = slice(1, op.rotary_dim, 2) if op.interleaved else slice(half, op.rotary_dim)
        cos = self._rope_cos[batch.positions][:, None, :]  # the same for every head
        sin = self._rope_sin[batch.positions][:, None, :]
        rotated[..., first] = x[..., first] * cos - x[..., second] * sin
        rotated[..., second] = x[..., second] * cos + x[..., first] * sin
        self._write(batch, op.x, rotated.reshape(len(x), -1))

    def _attend(self, op: Attention, batch: _Batch, sequence: _Sequence) -> Array:
        """Write the keys and values of one sequence's rows, then attend to all so far.

        Returns [rows, num_heads * head_dim]. In the sums r is a row, j a position, g a KV head,
        h a query head of its group and d a dimension of the head.
        """
        keys, values = self._keys[op.layer], self._values[op.layer]
        new_slots = sequence.slots[sequence.positions]
        kv_shape = (-1, op.num_kv_heads, op.head_dim)
        keys[new_slots] = self._read(batch, op.k)[sequence.rows].reshape(kv_shape)
        values[new_slots] = self._read(batch, op.v)[sequence.rows].reshape(kv_shape)

        group = op.num_heads // op.num_kv_heads
        q = self._read(batch, op.q)[sequence.rows]
        q = q.reshape(-1, op.num_kv_heads, group, op.head_dim)
        scores = np.einsum("rghd,jgd->rghj", q, keys[sequence.slots], optimize=True)
        scores *= self._dtype(op.scale)
        if op.soft_cap is not None:
            scores = np.tanh(scores / op.soft_cap) * op.soft_cap
        visible = _visible(sequence, op.window)[:, None, None, :]
        weights = _softmax(np.where(visible, scores, -np.inf))
        attended: Array = np.einsum(
            "rghj,jgd->rghd", weights, values[sequence.slots], optimize=True
        )
        return attended.reshape(len(q), -1)


def _sequence(scheduled: ScheduledRequest, rows: slice) -> _Sequence:
    start = scheduled.num_computed_tokens
    end = start + scheduled.num_scheduled_tokens
    positions = np.arange(end)
    blocks = np.array(scheduled.block_table, np.int64)
    if len(blocks) * BLOCK_SIZE < end:
        raise ValueError(
            f"the {len(blocks)} blocks of {scheduled.request.request_id} hold "
            f"{len(blocks) * BLOCK_SIZE} positions, but position {end - 1} is scheduled"
        )
    slots = blocks[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return _Sequence(rows, positions[start:], slots)


def _visible(sequence: _Sequence, window: int | None) -> npt.NDArray[np.bool_]:
    """Which positions each row may look at: [rows, positions so far]."""
    row_positions = sequence.positions[:, None]
    key_positions = np.arange(len(sequence.slots))
    visible: npt.NDArray[np.bool_] = key_positions <= row_positions
    if window is not None:
        visible &= key_positions > row_positions - window
    return visible


def _softmax(scores: Array) -> Array:
    exponentials = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities: Array = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities
