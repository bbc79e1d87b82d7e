"""Hands a recorded program and its weights to the native runtime."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shoal import _native
from shoal.executor.liveness import live_buffers
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
from shoal.model.weights import WeightTensor


def record_session(program: Program, isa: str) -> _native.Session:
    """A native session with all ops of `program`, ready for `start`; the weights are packed.

    Raises:
        ValueError: an op's shapes contradict each other, or the runtime can't run them.
    """
    session = _native.Session(
        vocab_size=program.vocab_size,
        max_model_len=program.max_model_len,
        num_layers=program.num_layers,
        num_kv_heads=program.num_kv_heads,
        head_dim=program.head_dim,
        rope_cos=program.rope_cos.reshape(-1),
        rope_sin=program.rope_sin.reshape(-1),
        isa=isa,
    )
    recorder = _Recorder(session, program)
    place, ops = 0, program.ops
    while place < len(ops):
        place += recorder.record_feed_forward(place) or recorder.record(ops[place])
    return session


class _Recorder:
    """Translates ops one by one; names of buffers and weights become indices."""

    def __init__(self, session: _native.Session, program: Program) -> None:
        self._session = session
        self._ops = program.ops
        self._live = live_buffers(program)
        self._weights = program.weights
        self._columns = program.buffers
        self._buffers: dict[str, int] = {}  # those in use
        # By names, and whether it is gated: packed once, even when used twice.
        self._linears: dict[tuple[tuple[str, ...], bool], int] = {}
        # A row's largest activations have 12 bits where an answer is most sensitive to them: in
        # what keys and values are computed from, and in the few rows that need logits.
        self._first_wide: dict[str, int] = {}  # by buffer: the first column of keys or values
        for op in program.ops:
            for view in (op.k, op.v) if isinstance(op, Attention) else ():
                first = self._first_wide.get(view.buffer, view.start)
                self._first_wide[view.buffer] = min(first, view.start)
        self._rows_are_selected = False

    def record_feed_forward(self, place: int) -> int:
        """Records a gated feed-forward layer as one op, where the runtime can; returns its ops."""
        match self._ops[place : place + 3]:
            case (Linear() as first, GatedActivation() as gate, Linear() as second) if (
                _is_gated_by(first, gate)
                and second.x == gate.out
                and not {first.out.buffer, gate.out.buffer} & self._live[place + 2]
                and not {first.out.buffer, second.out.buffer} & self._first_wide.keys()
                and self._can_multiply_gated(first, second)
            ):
                self._session.feed_forward(
                    self._view(first.x),
                    self._view(second.out),
                    self._matrix(first.weights, gated=True),
                    self._matrix(second.weights),
                    self._rows_are_selected,
                )
                self._record_biases(second)
                return 3
            case _:
                return 0

    def _can_multiply_gated(self, first: Linear, second: Linear) -> bool:
        stacks = self._stacks(first.weights), self._stacks(second.weights)
        if len(stacks[0]) > 1 or len(stacks[1]) > 1:
            return False
        types = [self._weights[stack[0][0]].type.value for stack in stacks]
        return _native.can_multiply_gated(types[0], first.out.width, types[1])

    def record(self, op: Op) -> int:
        """Records the op; returns 1, the number of ops recorded."""
        match op:
            case Embed():
                self._session.embed(self._view(op.out), self._matrix((op.weight,)))
            case RmsNorm():
                weight = self._vector(op.weight)
                self._session.rms_norm(self._view(op.x), self._view(op.out), weight, op.epsilon)
            case Linear():
                self._record_linear(op)
            case Rope():
                self._session.rope(
                    self._view(op.x), op.num_heads, op.head_dim, op.rotary_dim, op.interleaved
                )
            case Attention():
                self._record_attention(op)
            case GatedActivation():
                views = (self._view(view) for view in (op.gate, op.up, op.out))
                self._session.gated_activation(*views)
            case Add():
                self._session.add(self._view(op.x), self._view(op.y))
            case SelectRows():
                self._rows_are_selected = True
                self._session.select_rows(self._view(op.x), self._view(op.out))
            case Logits():
                self._session.logits(self._view(op.x), self._matrix((op.weight,)))
        return 1

    def _record_linear(self, op: Linear) -> None:
        x, start = self._view(op.x), op.out.start
        for names in self._stacks(op.weights):
            width = sum(self._weights[name].shape[0] for name in names)
            out = View(op.out.buffer, start, width)
            first_wide = self._first_wide_of(out)
            self._session.linear(x, self._view(out), self._matrix(names), first_wide)
            start += width
        if start != op.out.start + op.out.width:
            raise ValueError(f"{op.weights} have {start - op.out.start} rows, not {op.out.width}")
        self._record_biases(op)

    def _record_biases(self, op: Linear) -> None:
        start = op.out.start
        for weight, bias in zip(op.weights, op.biases, strict=True):
            width = self._weights[weight].shape[0]
            if bias is not None:
                out = self._view(View(op.out.buffer, start, width))
                self._session.add_bias(out, self._vector(bias))
            start += width

    def _first_wide_of(self, out: View) -> int:
        """The first output that is computed from wide activations; `out.width` if none is."""
        if self._rows_are_selected:
            return 0
        first = self._first_wide.get(out.buffer, out.start + out.width)
        return min(max(first - out.start, 0), out.width)

    def _stacks(self, names: tuple[str, ...]) -> list[tuple[str, ...]]:
        """Neighbours of one storage type, which are multiplied as one matrix."""
        stacks: list[tuple[str, ...]] = []
        for name in names:
            if stacks and self._weights[stacks[-1][-1]].type == self._weights[name].type:
                stacks[-1] += (name,)
            else:
                stacks.append((name,))
        return stacks

    def _record_attention(self, op: Attention) -> None:
        self._session.attention(
            self._view(op.q),
            self._view(op.k),
            self._view(op.v),
            self._view(op.out),
            op.layer,
            op.num_heads,
            op.num_kv_heads,
            op.head_dim,
            op.scale,
            op.window or 0,
            op.soft_cap or 0.0,
        )

    def _view(self, view: View) -> _native.View:
        if view.buffer not in self._buffers:
            columns = self._columns[view.buffer]
            self._buffers[view.buffer] = self._session.add_buffer(columns)
        return self._buffers[view.buffer], view.start, view.width

    def _matrix(self, names: tuple[str, ...], *, gated: bool = False) -> int:
        key = names, gated
        if key not in self._linears:
            stack = [self._weights[name] for name in names]
            inputs = _common_inputs(stack)
            try:
                self._linears[key] = self._session.add_linear(
                    storage_type=stack[0].type.value,
                    data=_stacked_bytes(stack),
                    outputs=sum(tensor.shape[0] for tensor in stack),
                    inputs=inputs,
                    gated=gated,
                )
            except ValueError as error:
                raise ValueError(f"{', '.join(names)}: {error}") from error
        return self._linears[key]

    def _vector(self, name: str) -> npt.NDArray[np.float32]:
        vector = dequantize(self._weights[name]).reshape(-1)
        if not np.isfinite(vector).all():
            raise ValueError(f"{name}: a weight is not finite")
        return vector


def _is_gated_by(linear: Linear, gate: GatedActivation) -> bool:
    """Whether the op computes the gates, then what they gate, and nothing else."""
    width, out = gate.gate.width, linear.out
    return (
        len(linear.weights) == 2
        and linear.biases == (None, None)
        and gate.gate == View(out.buffer, out.start, width)
        and gate.up == View(out.buffer, out.start + width, width)
        and out.width == 2 * width
        and gate.out.width == width
    )


def _stacked_bytes(stack: list[WeightTensor]) -> npt.NDArray[np.uint8]:
    if len(stack) == 1:
        return stack[0].data.reshape(-1)
    return np.concatenate([tensor.data.reshape(-1) for tensor in stack])


def _common_inputs(stack: list[WeightTensor]) -> int:
    inputs = {tensor.shape[1] for tensor in stack}
    if len(inputs) != 1:
        names = ", ".join(tensor.name for tensor in stack)
        raise ValueError(f"{names} don't have the same number of columns: {sorted(inputs)}")
    return inputs.pop()
