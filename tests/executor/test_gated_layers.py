"""A feed-forward layer recorded as one op against its three parts."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from tiny_programs import (
    QUANTIZED_SHAPES,
    TinyShape,
    make_executor,
    one_request_step,
    random_prompt,
    tiny_program,
)

from shoal import _native
from shoal.model.loader import open_model
from shoal.model.program import Add, GatedActivation, Linear, Op, Program, View
from shoal.model.weights import WeightTensor, WeightType

ISAS = _native.kernels.instruction_sets()
GATED_SHAPES = [shape for shape in QUANTIZED_SHAPES if not shape.biases]
NUM_TOKENS = (*[1] * 9, 15, 37, 100)
Floats = npt.NDArray[np.float32]


def with_zero_biases(program: Program) -> Program:
    """The same program with a bias of zeros on the gates, which keeps the parts apart."""

    def change(op: Op) -> Op:
        if not isinstance(op, Linear) or len(op.weights) != 2:
            return op
        return replace(op, biases=("zeros", "zeros"))

    width = next(op.out.width // 2 for op in program.ops if op != change(op))
    zeros = WeightTensor("zeros", (width,), WeightType.F32, np.zeros(4 * width, np.uint8))
    return replace(
        program,
        ops=tuple(change(op) for op in program.ops),
        weights={**program.weights, "zeros": zeros},
    )


def whole_and_parts(program: Program, isa: str) -> tuple[Floats, Floats]:
    """The logits of prompts with their layers whole, and in parts."""
    return all_logits(program, isa), all_logits(with_zero_biases(program), isa)


def all_logits(program: Program, isa: str) -> Floats:
    """The logits of all rows of a prompt of each of NUM_TOKENS, one prompt after the other."""
    executor = make_executor(program, num_threads=2, isa=isa)
    steps = [
        one_request_step(random_prompt(n, seed=seed, vocab_size=program.vocab_size))
        for seed, n in enumerate(NUM_TOKENS)
    ]
    return np.concatenate([executor.logits(step, all_rows=True)["a"] for step in steps])


def assert_close(one: Floats, other: Floats, isa: str) -> None:
    """The same bits, but on AMX: its exponential has few bits more than the bf16 of the result.

    Single rows of random tokens may depend on the last bits of their first layers.
    """
    if isa != "amx":
        np.testing.assert_array_equal(one.view(np.uint32), other.view(np.uint32))
        return
    errors = np.linalg.norm(one - other, axis=1) / np.linalg.norm(other, axis=1)
    ends = np.cumsum(NUM_TOKENS)
    single = NUM_TOKENS.count(1)  # prompts of one row, which count together
    for of_prompts in np.split(errors, ends[single - 1 : -1]):
        assert np.median(of_prompts) < 0.02


@pytest.mark.parametrize("isa", ISAS)
def test_one_op_computes_what_its_parts_do(model_path: Path, isa: str) -> None:
    program = open_model(model_path).record_program(256)
    whole, parts = whole_and_parts(program, isa)
    assert_close(whole, parts, isa)
    assert (whole.argmax(axis=1) == parts.argmax(axis=1)).mean() > 0.9


@pytest.mark.parametrize("shape", GATED_SHAPES)
@pytest.mark.parametrize("isa", ISAS)
def test_one_op_computes_what_its_parts_do_for_mixed_types(shape: TinyShape, isa: str) -> None:
    assert_close(*whole_and_parts(tiny_program(shape), isa), isa)


def feed_forward_ops(program: Program) -> slice:
    """Where the first norm, gates, activation, second layer and addition to the residual are."""
    gate = next(i for i, op in enumerate(program.ops) if isinstance(op, GatedActivation))
    return slice(gate - 2, gate + 3)


def with_first_layer(program: Program, layers: list[list[Op]]) -> Program:
    """The same program with `layers` in place of its first feed-forward layer."""
    place = feed_forward_ops(program)
    ops = list(program.ops)
    ops[place] = [op for layer in layers for op in layer]
    return replace(program, ops=tuple(ops))


@pytest.mark.parametrize("whole_first", [True, False])
@pytest.mark.parametrize("isa", ISAS)
def test_weights_may_be_used_in_one_op_and_in_parts(isa: str, whole_first: bool) -> None:
    program = tiny_program(GATED_SHAPES[1])
    apart = with_zero_biases(program)
    layers = [list(one.ops[feed_forward_ops(one)]) for one in (program, apart)]
    both = with_first_layer(apart, layers if whole_first else layers[::-1])
    assert_close(*whole_and_parts(both, isa), isa)


@pytest.mark.parametrize("isa", ISAS)
def test_a_layer_may_write_where_it_reads(isa: str) -> None:
    program = tiny_program(GATED_SHAPES[1])
    *first, second, add = program.ops[feed_forward_ops(program)]
    assert isinstance(second, Linear)
    assert isinstance(add, Add)
    normed = first[0].out
    in_place = [*first, replace(second, out=normed), replace(add, y=normed)]
    got = all_logits(with_first_layer(program, [in_place]), isa)
    want = all_logits(program, isa)
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("after_another", [True, False])
def test_what_one_op_would_not_write_may_be_read_later(after_another: bool, isa: str) -> None:
    program = tiny_program(GATED_SHAPES[1])
    whole = list(program.ops[feed_forward_ops(program)])
    apart = list(with_zero_biases(program).ops[feed_forward_ops(program)])
    again = whole[-2:]  # the second layer once more, and what it adds
    layers = [apart, whole, again] if after_another else [whole, again]
    # With its biases of zeros, which `apart` names.
    reread = with_first_layer(with_zero_biases(program), layers)
    assert_close(*whole_and_parts(reread, isa), isa)


def with_gates_among_keys(program: Program) -> Program:
    """The same program with gates in the buffer of keys and values, whose inputs have 12 bits."""

    def moved(op: Op) -> Op:
        views = {f.name: getattr(op, f.name) for f in fields(op)}
        gates = {
            name: replace(view, buffer="qkv")
            for name, view in views.items()
            if isinstance(view, View) and view.buffer == "gate_up"
        }
        return replace(op, **gates)

    width = max(program.buffers["qkv"], program.buffers["gate_up"])
    ops = tuple(moved(op) for op in program.ops)
    return replace(program, ops=ops, buffers={**program.buffers, "qkv": width})


@pytest.mark.parametrize("isa", ISAS)
def test_gates_among_keys_are_as_wide_in_one_op_as_in_parts(isa: str) -> None:
    program = with_gates_among_keys(tiny_program(GATED_SHAPES[1]))
    assert_close(*whole_and_parts(program, isa), isa)


def test_layers_are_one_op_unless_their_parts_are_read_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = []

    class RecordedSession(_native.Session):
        def feed_forward(self, *args: object) -> None:
            recorded.append(args)
            super().feed_forward(*args)

    monkeypatch.setattr(_native, "Session", RecordedSession)
    program = tiny_program(GATED_SHAPES[1])
    layer = list(program.ops[feed_forward_ops(program)])
    reread = with_first_layer(program, [layer, layer[-2:]])
    cases = (
        (program, 2),
        (reread, 1),
        (with_zero_biases(program), 0),
        (with_gates_among_keys(program), 0),
    )
    for one, num_whole in cases:
        recorded.clear()
        make_executor(one)
        assert len(recorded) == num_whole


def test_only_the_gates_of_a_feed_forward_layer_may_be_gated() -> None:
    session = _native.Session(
        vocab_size=64,
        max_model_len=1,
        num_layers=1,
        num_kv_heads=1,
        head_dim=16,
        rope_cos=np.ones(8, np.float32),
        rope_sin=np.zeros(8, np.float32),
        isa="portable",
    )
    zeros = np.zeros(64 * 32 * 4, np.uint8)
    gated = session.add_linear("Q8_0", zeros[: 64 * 34], 64, 32, gated=True)
    apart = session.add_linear("Q8_0", zeros[: 64 * 34], 64, 32)
    dense = session.add_linear("F32", zeros, 64, 32)
    x, out = (session.add_buffer(32), 0, 32), (session.add_buffer(64), 0, 64)
    for refused in (
        lambda: session.embed(x, gated),
        lambda: session.linear(x, out, gated, 0),
        lambda: session.feed_forward(x, out, gated, gated, False),
    ):
        with pytest.raises(ValueError, match="linear 0 is gated"):
            refused()
    with pytest.raises(ValueError, match="linear 1 is not gated"):
        session.feed_forward(x, out, apart, apart, False)
    with pytest.raises(ValueError, match="must be quantised"):
        session.feed_forward(x, out, gated, dense, False)
