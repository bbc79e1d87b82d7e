"""Attention through block tables: against NumPy in float64, and exact however it is divided."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal._native import kernels

Floats = npt.NDArray[np.float32]
ISAS = kernels.instruction_sets()
BEST = ISAS[-1]
BLOCK = 16


@dataclass(frozen=True)
class Heads:
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 16
    scale: float = 0.25
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True)
class Sequence:
    """Keys and values [tokens, kv_heads, head_dim] in half, and the queries of the last tokens."""

    q: Floats  # [queries, num_heads, head_dim]
    k: npt.NDArray[np.float16]
    v: npt.NDArray[np.float16]

    @property
    def num_computed(self) -> int:
        return len(self.k) - len(self.q)

    def part(self, first: int, end: int) -> Sequence:
        """The queries `first` to `end` alone, with the keys that they may see."""
        keys = self.num_computed + end
        return Sequence(self.q[first:end], self.k[:keys], self.v[:keys])


def random_sequence(heads: Heads, tokens: int, queries: int, seed: int) -> Sequence:
    rng = np.random.default_rng(seed)
    kv_shape = (tokens, heads.num_kv_heads, heads.head_dim)
    return Sequence(
        q=rng.standard_normal((queries, heads.num_heads, heads.head_dim)).astype(np.float32),
        k=rng.standard_normal(kv_shape).astype(np.float16),
        v=rng.standard_normal(kv_shape).astype(np.float16),
    )


def reference(heads: Heads, sequence: Sequence) -> npt.NDArray[np.float64]:
    group = heads.num_heads // heads.num_kv_heads
    out = np.zeros(sequence.q.shape)
    for i, queries in enumerate(sequence.q.astype(np.float64)):
        last = sequence.num_computed + i + 1
        first = max(0, last - heads.window) if heads.window else 0
        for head, q in enumerate(queries):
            k = sequence.k[first:last, head // group].astype(np.float64)
            v = sequence.v[first:last, head // group].astype(np.float64)
            scores = k @ q * heads.scale
            if heads.soft_cap:
                scores = heads.soft_cap * np.tanh(scores / heads.soft_cap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v / weights.sum()
    return out


def native(
    heads: Heads,
    sequences: list[Sequence],
    isa: str = BEST,
    num_threads: int = 1,
    block_order: int = 0,
) -> list[Floats]:
    """Attention of a batch. Blocks lie in random order among others; what is not written is NaN."""
    needed = [-(-len(sequence.k) // BLOCK) for sequence in sequences]
    rng = np.random.default_rng(block_order)
    block_ids = rng.permutation(sum(needed) + 3).astype(np.int32)
    kv = np.full(
        (len(block_ids), heads.num_kv_heads, 2, BLOCK * heads.head_dim), np.nan, np.float16
    )
    starts = np.cumsum([0, *needed]).astype(np.int32)
    for sequence, start in zip(sequences, starts, strict=False):
        for token in range(len(sequence.k)):
            block = kv[block_ids[start + token // BLOCK]]
            keys = block[:, 0].reshape(heads.num_kv_heads, heads.head_dim, BLOCK)
            values = block[:, 1].reshape(heads.num_kv_heads, BLOCK, heads.head_dim)
            keys[:, :, token % BLOCK] = sequence.k[token]
            values[:, token % BLOCK] = sequence.v[token]
    q = np.concatenate([sequence.q for sequence in sequences])
    query_start_loc = np.cumsum([0, *(len(sequence.q) for sequence in sequences)]).astype(np.int32)
    out = kernels.attention(
        isa,
        num_threads,
        q=q.reshape(-1),
        kv=kv.reshape(-1).view(np.uint16),
        query_start_loc=query_start_loc,
        num_computed_tokens=np.array([s.num_computed for s in sequences], np.int32),
        block_tables=block_ids,
        block_table_start=starts,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        scale=heads.scale,
        window=heads.window,
        soft_cap=heads.soft_cap,
    ).reshape(q.shape)
    return np.split(out, query_start_loc[1:-1])


def assert_same_bits(got: Floats, want: Floats) -> None:
    np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


HEADS = [
    Heads(),
    Heads(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125),
    Heads(num_heads=2, num_kv_heads=2, head_dim=80),
    Heads(num_heads=8, num_kv_heads=1, head_dim=256, scale=0.0625),
    Heads(num_heads=4, num_kv_heads=2, head_dim=48, window=20),
    Heads(num_heads=2, num_kv_heads=1, window=300),
    Heads(num_heads=2, num_kv_heads=1, window=1),
    Heads(num_heads=3, num_kv_heads=1, scale=3.0, soft_cap=5.0),
]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "queries"), [(1, 1), (17, 17), (256, 1), (257, 40), (700, 70)])
def test_agrees_with_float64_and_across_instruction_sets(
    heads: Heads, tokens: int, queries: int
) -> None:
    sequence = random_sequence(heads, tokens, queries, seed=tokens)
    first, *others = [native(heads, [sequence], isa)[0] for isa in ISAS]
    np.testing.assert_allclose(first, reference(heads, sequence), rtol=2e-5, atol=2e-5)
    for other in others:
        assert_same_bits(other, first)


@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from(HEADS),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 700)), min_size=1, max_size=5),
    cut=st.integers(1, 59),
    seed=st.integers(0, 1000),
)
def test_batch_mates_chunks_threads_and_blocks_change_no_bit(
    heads: Heads, lengths: list[tuple[int, int]], cut: int, seed: int
) -> None:
    sequences = [
        random_sequence(heads, queries + computed, queries, seed + i)
        for i, (queries, computed) in enumerate(lengths)
    ]
    together = native(heads, sequences, num_threads=3, block_order=seed)
    for sequence, got in zip(sequences, together, strict=True):
        assert_same_bits(got, native(heads, [sequence])[0])
    sequence, got = sequences[0], together[0]
    cut = min(cut, len(sequence.q))
    parts = [sequence.part(0, cut), sequence.part(cut, len(sequence.q))]
    alone = [native(heads, [part], num_threads=2)[0] for part in parts if len(part.q)]
    assert_same_bits(np.concatenate(alone), got)


def test_a_long_sequence_is_divided_over_threads_without_changing_a_bit() -> None:
    heads = Heads(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    sequence = random_sequence(heads, 2000, 1, seed=5)
    one, *more = [native(heads, [sequence], num_threads=n)[0] for n in (1, 2, 4)]
    np.testing.assert_allclose(one, reference(heads, sequence), rtol=2e-5, atol=2e-5)
    for other in more:
        assert_same_bits(other, one)


def test_large_scores_do_not_overflow() -> None:
    heads = Heads(scale=1000.0)
    sequence = random_sequence(heads, 300, 3, seed=6)
    got = native(heads, [sequence])[0]
    np.testing.assert_allclose(got, reference(heads, sequence), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("token", [0, 270])
def test_a_key_that_is_not_finite_shows_in_the_result_of_those_who_see_it(
    bad: float, token: int
) -> None:
    heads = Heads(num_heads=1)
    sequence = random_sequence(heads, 600, 600, seed=7)
    keys = sequence.k.copy()
    keys[token, 0, 3] = bad
    got = native(heads, [replace(sequence, k=keys)])[0]
    assert np.isfinite(got[:token]).all()
    assert np.isnan(got[token:]).all(axis=(1, 2)).all()
