"""A feed-forward layer recorded as one op against its three parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_programs import make_executor, one_request_step, random_prompt

from shoal._native import kernels
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


@pytest.mark.parametrize("isa", kernels.instruction_sets())
def test_one_op_computes_what_its_parts_do(model_path: Path, isa: str) -> None:
    """But for rounding on AMX: its exponential has few bits more than the bf16 of the result."""
    program = open_model(model_path).record_program(256)
    for tokens in (1, 15, 37, 100):
        step = one_request_step(random_prompt(tokens, seed=tokens, vocab_size=49152))
        whole, parts = (
            make_executor(one, num_threads=2, isa=isa).logits(step, all_rows=True)["a"]
            for one in (program, with_zero_biases(program))
        )
        if isa != "amx":
            np.testing.assert_array_equal(whole.view(np.uint32), parts.view(np.uint32))
            continue
        errors = np.linalg.norm(whole - parts, axis=1) / np.linalg.norm(parts, axis=1)
        assert errors.mean() < 0.02
        assert (whole.argmax(axis=1) == parts.argmax(axis=1)).mean() > 0.9
