"""A feed-forward layer recorded as one op against its three parts."""

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


def test_one_op_computes_what_its_parts_do(model_path: Path) -> None:
    """But for rounding: on AMX the exponential has few bits more than the bf16 of the result."""
    program = open_model(model_path).record_program(256)
    for tokens in (1, 15, 37, 100):
        step = one_request_step(random_prompt(tokens, seed=tokens, vocab_size=49152))
        whole = make_executor(program).logits(step, all_rows=True)["a"]
        parts = make_executor(with_zero_biases(program)).logits(step, all_rows=True)["a"]
        errors = np.linalg.norm(whole - parts, axis=1) / np.linalg.norm(parts, axis=1)
        assert errors.mean() < 0.02
        assert (whole.argmax(axis=1) == parts.argmax(axis=1)).mean() > 0.9
