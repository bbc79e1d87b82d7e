"""Attention through block tables: against NumPy in float64, and exact however it is divided.

The instruction set "amx" multiplies in bf16: it has a KV layout and bits of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal._native import kernels

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
ISAS = kernels.instruction_sets()
BEST = ISAS[-1]
BLOCK = 16
# Half the distance of neighbours in bf16, relative, and the error of the exponential before that.
BF16_ERROR = 2.0**-8 + 1e-4


def to_bf16(x: npt.ArrayLike) -> Halves:
    """The bits of the nearest bf16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def rounded(x: npt.ArrayLike) -> Floats:
    """The nearest bf16, as float32."""
    return (to_bf16(x).astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Heads:
    num_heads: int = 3
    num_kv_heads: int = 1
    head_dim: int = 16
    scale: float = 0.25
    window: int = 0
    soft_cap: float = 0.0

    @property
    def score_error(self) -> float:
        """What rounding in fp32 may change, relative: more where scores are large."""
        return 2e-5 if self.scale < 100 else 1e-3


@dataclass(frozen=True)
class Sequence:
    """Keys and values [tokens, kv_heads, head_dim], exact in bf16; queries of the last tokens."""

    q: Floats  # [queries, num_heads, head_dim]
    k: Floats
    v: Floats

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
        k=rounded(rng.standard_normal(kv_shape)),
        v=rounded(rng.standard_normal(kv_shape)),
    )


def assert_near_reference(got: Floats, heads: Heads, sequence: Sequence, isa: str = BEST) -> None:
    """Compares with float64, given the queries as the instruction set rounds them.

    Where weights w are rounded to bf16, each by a factor of at most 1 +- BF16_ERROR, the result
    moves by at most that times the mean of |v - result| with the weights w.
    """
    group = heads.num_heads // heads.num_kv_heads
    error = BF16_ERROR / (1 - BF16_ERROR) if isa == "amx" else 0.0
    rows = rounded(sequence.q) if isa == "amx" else sequence.q
    for i, queries in enumerate(rows.astype(np.float64)):
        last = sequence.num_computed + i + 1
        first = max(0, last - heads.window) if heads.window else 0
        for head, q in enumerate(queries):
            k = sequence.k[first:last, head // group].astype(np.float64)
            v = sequence.v[first:last, head // group].astype(np.float64)
            scores = k @ q * heads.scale
            if heads.soft_cap:
                scores = heads.soft_cap * np.tanh(scores / heads.soft_cap)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            want = weights @ v
            bound = error * (weights @ abs(v - want)) + heads.score_error * (1 + abs(want))
            assert (abs(got[i, head] - want) <= bound).all(), (i, head)


def write_tokens(kv: Halves, isa: str, token: int, k: Floats, v: Floats) -> None:
    """Writes a token to a block: kv [kv_heads, 2, 16 * head_dim], k and v [kv_heads, head_dim]."""
    heads, dim = k.shape
    if isa == "amx":
        keys = kv[:, 0].reshape(heads, dim // 2, BLOCK, 2)
        values = kv[:, 1].reshape(heads, dim // 16, BLOCK // 2, 16, 2)
        keys[:, :, token] = to_bf16(k).reshape(heads, -1, 2)
        values[:, :, token // 2, :, token % 2] = to_bf16(v).reshape(heads, -1, 16)
    else:
        kv[:, 0].reshape(heads, dim, BLOCK)[:, :, token] = k.astype(np.float16).view(np.uint16)
        kv[:, 1].reshape(heads, BLOCK, dim)[:, token] = v.astype(np.float16).view(np.uint16)


def native(
    heads: Heads,
    sequences: list[Sequence],
    isa: str = BEST,
    num_threads: int = 1,
    block_order: int = 0,
) -> list[Floats]:
    """Attention of a batch. Blocks lie in random order among others.

    What is not written is NaN or infinite.
    """
    needed = [-(-len(sequence.k) // BLOCK) for sequence in sequences]
    rng = np.random.default_rng(block_order)
    block_ids = rng.permutation(sum(needed) + 3).astype(np.int32)
    garbage = [0x7FFF, 0x7F80, 0xFF80, 0x7C00]  # NaN in half or bf16 or both, or infinite
    kv_shape = (len(block_ids), heads.num_kv_heads, 2, BLOCK * heads.head_dim)
    kv = rng.choice(np.array(garbage, np.uint16), kv_shape)
    starts = np.cumsum([0, *needed]).astype(np.int32)
    for sequence, start in zip(sequences, starts, strict=False):
        for token in range(len(sequence.k)):
            block = kv[block_ids[start + token // BLOCK]]
            write_tokens(block, isa, token % BLOCK, sequence.k[token], sequence.v[token])
    q = np.concatenate([sequence.q for sequence in sequences])
    query_start_loc = np.cumsum([0, *(len(sequence.q) for sequence in sequences)]).astype(np.int32)
    out = kernels.attention(
        isa,
        num_threads,
        q=q.reshape(-1),
        kv=kv.reshape(-1),
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
    Heads(num_heads=5, num_kv_heads=1, head_dim=96),
    Heads(num_heads=6, num_kv_heads=1, head_dim=128, scale=0.09, window=40),
    Heads(num_heads=7, num_kv_heads=1, head_dim=64, scale=0.125, soft_cap=20.0),
]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "queries"), [(1, 1), (17, 17), (256, 1), (257, 40), (700, 70)])
def test_agrees_with_float64_and_across_instruction_sets(
    heads: Heads, tokens: int, queries: int
) -> None:
    sequence = random_sequence(heads, tokens, queries, seed=tokens)
    got = {isa: native(heads, [sequence], isa)[0] for isa in ISAS}
    for isa in ISAS:
        assert_near_reference(got[isa], heads, sequence, isa)
        if isa != "amx":
            assert_same_bits(got[isa], got[ISAS[0]])


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
    assert_near_reference(one, heads, sequence)
    for other in more:
        assert_same_bits(other, one)


def test_large_scores_do_not_overflow() -> None:
    heads = Heads(scale=1000.0)
    sequence = random_sequence(heads, 300, 3, seed=6)
    assert_near_reference(native(heads, [sequence])[0], heads, sequence)


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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("token", [0, 270])
def test_a_value_that_is_not_finite_changes_nothing_for_those_who_do_not_see_it(
    bad: float, window: int, token: int
) -> None:
    heads = Heads(head_dim=48, window=window)
    sequence = random_sequence(heads, 400, 400, seed=8)
    values = sequence.v.copy()
    values[token, 0, 3] = bad
    got = native(heads, [replace(sequence, v=values)])[0]
    seen = slice(token, token + window if window else None)
    assert not np.isfinite(got[seen, :, 3]).any()
    got[seen, :, 3] = 0
    want = native(heads, [sequence])[0]
    want[seen, :, 3] = 0
    assert_same_bits(got, want)


@pytest.mark.skipif("amx" not in ISAS, reason="needs AMX")
@pytest.mark.parametrize("head_dim", [16, 64, 256])
@pytest.mark.parametrize("token", [4, 11])
def test_write_kv_writes_tiles_in_the_nearest_bf16(head_dim: int, token: int) -> None:
    rng = np.random.default_rng(9)
    k, v = (rng.standard_normal((1, head_dim)).astype(np.float32) for _ in range(2))
    k[0, :8] = [0.0, -0.0, 65520.0, 3.4e38, 1e-30, 1 + 2.0**-8, 1 + 3 * 2.0**-8, -np.inf]
    want = np.zeros((1, 2, BLOCK * head_dim), np.uint16)
    write_tokens(want, "amx", token, k, v)
    got = kernels.write_kv("amx", k[0], v[0], token)
    np.testing.assert_array_equal(got, want.reshape(-1))
