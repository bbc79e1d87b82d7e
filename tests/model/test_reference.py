"""The reference executor computes the same whatever the batch, the chunks and the blocks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf_files import TinyModel, write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config import BLOCK_SIZE
from shoal.executor.reference import ReferenceExecutor
from shoal.model.loader import open_model
from shoal.model.program import (
    Attention,
    Embed,
    Linear,
    Logits,
    Program,
    Rope,
    SelectRows,
    View,
)
from shoal.model.weights import WeightTensor, WeightType
from shoal.request import Request, SamplingParams
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep

NUM_BLOCKS = 32
LENGTH = 50
IDS = [int(token) for token in np.random.default_rng(3).integers(0, 300, LENGTH)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    path = tmp_path_factory.mktemp("reference") / "tiny.gguf"
    return open_model(write_tiny_model(path, TinyModel(biases=True))).record_program(64)


@pytest.fixture(scope="module")
def alone(program: Program) -> npt.NDArray[Any]:
    executor = ReferenceExecutor(program, NUM_BLOCKS, np.float64)
    return executor.logits(step(share("a", 0, LENGTH, [0, 1, 2, 3])), all_rows=True)["a"]


def share(
    request_id: str, start: int, end: int, block_table: list[int], sample: bool = True
) -> ScheduledRequest:
    request = Request(request_id, IDS, SamplingParams(), max_tokens=1, seed=0)
    return ScheduledRequest(request, IDS[start:end], start, block_table, sample)


def step(*shares: ScheduledRequest) -> ScheduledStep:
    return ScheduledStep(0, list(shares))


@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6), blocks=st.permutations(range(8)))
def test_chunks_and_scattered_blocks_do_not_matter(
    program: Program, alone: npt.NDArray[Any], cuts: set[int], blocks: list[int]
) -> None:
    executor = ReferenceExecutor(program, NUM_BLOCKS, np.float64)
    edges = [0, *sorted(cuts), LENGTH]
    rows = [
        executor.logits(step(share("a", start, end, blocks)), all_rows=True)["a"]
        for start, end in itertools.pairwise(edges)
    ]
    np.testing.assert_allclose(np.concatenate(rows), alone, rtol=0, atol=1e-10)


def test_batch_mates_do_not_matter(program: Program, alone: npt.NDArray[Any]) -> None:
    executor = ReferenceExecutor(program, NUM_BLOCKS, np.float64)
    executor.logits(step(share("b", 0, 20, [9, 4])))
    mixed = step(
        share("a", 0, 30, [7, 2]),
        share("b", 20, 21, [9, 4]),
        share("c", 0, 5, [11], sample=False),
    )
    logits = executor.logits(mixed)
    assert set(logits) == {"a", "b"}  # c doesn't sample
    np.testing.assert_allclose(logits["a"], alone[29:30], rtol=0, atol=1e-10)
    np.testing.assert_allclose(logits["b"], alone[20:21], rtol=0, atol=1e-10)


def test_all_rows_are_given_when_asked_for(program: Program, alone: npt.NDArray[Any]) -> None:
    executor = ReferenceExecutor(program, NUM_BLOCKS, np.float64)
    mixed = step(share("a", 0, 7, [7]), share("b", 0, 5, [11], sample=False))
    logits = executor.logits(mixed, all_rows=True)
    np.testing.assert_allclose(logits["a"], alone[:7], rtol=0, atol=1e-10)
    np.testing.assert_allclose(logits["b"], alone[:5], rtol=0, atol=1e-10)


def test_float32_is_close_to_float64(program: Program, alone: npt.NDArray[Any]) -> None:
    executor = ReferenceExecutor(program, NUM_BLOCKS)
    logits = executor.logits(step(share("a", 0, LENGTH, [0, 1, 2, 3])), all_rows=True)["a"]
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


def test_a_block_table_that_is_too_short_is_refused(program: Program) -> None:
    executor = ReferenceExecutor(program, NUM_BLOCKS)
    with pytest.raises(ValueError, match="the 1 blocks of a hold 16 positions, but position 19"):
        executor.logits(step(share("a", 0, 20, [0])))


WIDTH = 8


def one_head_program(attention: dict[str, Any], *, interleaved: bool = True) -> Program:
    """q = k = v = the token's row of the embedding; the output is what attention gives."""
    rng = np.random.default_rng(0)
    matrices = {
        "embedding": rng.standard_normal((300, WIDTH)),
        "qkv": np.concatenate([np.eye(WIDTH)] * 3),
        "output": np.eye(WIDTH),
    }
    q, k, v = (View("qkv", part * WIDTH, WIDTH) for part in range(3))
    x, out, selected = (View(name, 0, WIDTH) for name in ("x", "out", "selected"))
    angles = np.arange(64)[:, None] * np.array([1.0, 0.3], np.float64)
    return Program(
        ops=(
            Embed(x, "embedding"),
            Linear(x, View("qkv", 0, 3 * WIDTH), ("qkv",), (None,)),
            Rope(q, 1, WIDTH, rotary_dim=4, interleaved=interleaved),
            Rope(k, 1, WIDTH, rotary_dim=4, interleaved=interleaved),
            Attention(q, k, v, out, 0, 1, 1, WIDTH, scale=1.0, **attention),
            SelectRows(out, selected),
            Logits(selected, "output"),
        ),
        buffers={"x": WIDTH, "qkv": 3 * WIDTH, "out": WIDTH, "selected": WIDTH},
        weights={
            name: WeightTensor(
                name,
                values.shape,
                WeightType.F32,
                values.astype(np.float32).reshape(-1).view(np.uint8),
            )
            for name, values in matrices.items()
        },
        vocab_size=WIDTH,
        num_layers=1,
        num_kv_heads=1,
        head_dim=WIDTH,
        max_model_len=64,
        rope_cos=np.cos(angles).astype(np.float32),
        rope_sin=np.sin(angles).astype(np.float32),
    )


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("attention", [{}, {"window": 5}, {"soft_cap": 1.5}])
def test_attention_follows_its_definition(attention: dict[str, Any], interleaved: bool) -> None:
    program = one_head_program(attention, interleaved=interleaved)
    executor = ReferenceExecutor(program, NUM_BLOCKS, np.float64)
    logits = executor.logits(step(share("a", 0, 20, [5, 3])), all_rows=True)["a"]

    embedding = program.weights["embedding"].data.view(np.float32).reshape(300, WIDTH)
    values = embedding[IDS[:20]].astype(np.float64)
    pairs = [(0, 1), (2, 3)] if interleaved else [(0, 2), (1, 3)]
    rotated = values.copy()
    for index, (first, second) in enumerate(pairs):
        turned = values[:, first] + 1j * values[:, second]
        turned *= program.rope_cos[:20, index] + 1j * program.rope_sin[:20, index]
        rotated[:, first], rotated[:, second] = turned.real, turned.imag
    for position in range(20):
        first_seen = max(0, position + 1 - attention.get("window", 64))
        seen = slice(first_seen, position + 1)
        scores = rotated[seen] @ rotated[position]
        if "soft_cap" in attention:
            scores = 1.5 * np.tanh(scores / 1.5)
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(logits[position], weights @ values[seen], rtol=0, atol=1e-12)


def test_a_block_past_the_pool_is_refused(program: Program) -> None:
    executor = ReferenceExecutor(program, num_blocks=1)
    executor.logits(step(share("a", 0, BLOCK_SIZE, [0])))
    with pytest.raises(IndexError):
        executor.logits(step(share("a", 0, BLOCK_SIZE, [1])))
