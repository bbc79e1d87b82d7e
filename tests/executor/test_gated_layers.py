"""A feed-forward layer recorded as one op gives the bits of its three parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from tiny_programs import make_executor, one_request_step, random_prompt

from shoal.model.loader import open_model
from shoal.model.program import Linear, Op, Program
from shoal.model.weights import WeightTensor, WeightType


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


def test_one_op_has_the_bits_of_its_parts(model_path: Path) -> None:
    program = open_model(model_path).record_program(256)
    for tokens in (1, 15, 37, 100):
        step = one_request_step(random_prompt(tokens, seed=tokens, vocab_size=49152))
        whole = make_executor(program).logits(step, all_rows=True)["a"]
        parts = make_executor(with_zero_biases(program)).logits(step, all_rows=True)["a"]
        np.testing.assert_array_equal(whole.view(np.uint32), parts.view(np.uint32))
