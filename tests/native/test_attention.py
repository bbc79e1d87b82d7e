"""Attention through block tables: against NumPy in float64, and exact however it is divided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attention_reference import (
    BLOCK,
    INT8_ISAS,
    ISAS,
    Floats,
    Heads,
    Quantized,
    Sequence,
    assert_near_reference,
    from_bf16,
    head_halves,
    native,
    random_sequence,
    rotation,
    write_quants,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal._native import kernels


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
        alike = INT8_ISAS if isa in INT8_ISAS else ISAS
        assert_same_bits(got[isa], got[alike[0]])


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("head_dim", range(16, 257, 16))
@pytest.mark.parametrize("group", [1, 4, 9])
def test_int8_takes_heads_and_groups_of_any_size(isa: str, head_dim: int, group: int) -> None:
    heads = Heads(num_heads=group, head_dim=head_dim, scale=head_dim**-0.5)
    sequence = random_sequence(heads, 90, 20, seed=head_dim)
    got = native(heads, [sequence], isa)[0]
    assert_near_reference(got, heads, sequence, isa)
    for query in range(len(sequence.q)):
        alone = native(heads, [sequence.part(query, query + 1)], isa)[0]
        assert_same_bits(alone, got[query : query + 1])


@pytest.mark.parametrize("isa", INT8_ISAS or ISAS[-1:])
@settings(max_examples=25, deadline=None)
@given(
    heads=st.sampled_from(HEADS),
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 700)), min_size=1, max_size=5),
    cut=st.integers(1, 59),
    seed=st.integers(0, 1000),
)
def test_batch_mates_chunks_threads_and_blocks_change_no_bit(
    isa: str, heads: Heads, lengths: list[tuple[int, int]], cut: int, seed: int
) -> None:
    sequences = [
        random_sequence(heads, queries + computed, queries, seed + i)
        for i, (queries, computed) in enumerate(lengths)
    ]
    together = native(heads, sequences, isa, num_threads=3, block_order=seed)
    for sequence, got in zip(sequences, together, strict=True):
        assert_same_bits(got, native(heads, [sequence], isa)[0])
    sequence, got = sequences[0], together[0]
    cut = min(cut, len(sequence.q))
    parts = [sequence.part(0, cut), sequence.part(cut, len(sequence.q))]
    alone = [native(heads, [part], isa, num_threads=2)[0] for part in parts if len(part.q)]
    assert_same_bits(np.concatenate(alone), got)


def test_a_long_sequence_is_divided_over_threads_without_changing_a_bit() -> None:
    heads = Heads(num_heads=9, num_kv_heads=3, head_dim=64, scale=0.125)
    sequence = random_sequence(heads, 2000, 1, seed=5)
    one, *more = [native(heads, [sequence], num_threads=n)[0] for n in (1, 2, 4)]
    assert_near_reference(one, heads, sequence)
    for other in more:
        assert_same_bits(other, one)


@pytest.mark.parametrize("scale", [1e3, 1e8, 1e12])
@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_do_not_overflow(scale: float, isa: str) -> None:
    heads = Heads(scale=scale)
    sequence = random_sequence(heads, 300, 3, seed=6)
    got = native(heads, [sequence], isa)[0]
    assert_near_reference(got, heads, sequence, isa)


@pytest.mark.parametrize("isa", INT8_ISAS)
def test_a_weight_of_half_a_part_in_4096_is_not_lost(isa: str) -> None:
    heads = Heads(num_heads=1, scale=1.0)
    q, k, v = (np.zeros((count, 1, 16), np.float32) for count in (1, 2, 2))
    q[0, 0, 0] = 1.0
    k[0, 0, 0] = 12.5 * np.log(2)  # the other key weighs 2^-12.5
    v[0, 0, 0] = v[1, 0, 1] = 1.0
    got = native(heads, [Sequence(q, k, v)], isa)[0][0, 0]
    assert got[0] == pytest.approx(1.0, rel=0.01)
    assert got[1] == pytest.approx(2.0**-12, rel=0.1)


def test_a_query_of_zeros_sees_its_window_alone() -> None:
    heads = Heads(num_heads=5, head_dim=32, window=3, scale=1e-20)
    sequence = random_sequence(heads, 200, 200, seed=12)
    sequence.q[:] = 0.0
    got = native(heads, [sequence])[0]
    assert_near_reference(got, heads, sequence)
    assert_same_bits(native(heads, [sequence.part(100, 101)])[0], got[100:101])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("token", [0, 270])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
@pytest.mark.parametrize("isa", ISAS)
def test_a_key_that_is_not_finite_shows_in_the_result_of_those_who_see_it(
    isa: str, soft_cap: float, bad: float, token: int
) -> None:
    heads = Heads(num_heads=1, soft_cap=soft_cap)
    sequence = random_sequence(heads, 600, 600, seed=7)
    keys = sequence.k.copy()
    keys[token, 0, 3] = bad
    got = native(heads, [replace(sequence, k=keys)], isa)[0]
    assert np.isfinite(got[:token]).all()
    assert np.isnan(got[token:]).all(axis=(1, 2)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("token", [0, 270])
@pytest.mark.parametrize("isa", INT8_ISAS or ISAS[-1:])
@pytest.mark.parametrize("num_heads", [1, 3])  # with one, a tile of queries crosses a chunk's end
def test_a_value_that_is_not_finite_changes_nothing_for_those_who_do_not_see_it(
    isa: str, num_heads: int, bad: float, window: int, token: int
) -> None:
    heads = Heads(num_heads=num_heads, head_dim=48, window=window)
    sequence = random_sequence(heads, 400, 400, seed=8)
    values = sequence.v.copy()
    values[token, 0, 3] = bad
    got = native(heads, [replace(sequence, v=values)], isa)[0]
    seen = slice(token, token + window if window else None)
    spoiled = slice(None) if isa in INT8_ISAS else 3  # in int8 a token's values share a scale
    assert not np.isfinite(got[seen, :, spoiled]).any()
    got[seen, :, spoiled] = 0
    want = native(heads, [sequence], isa)[0]
    want[seen, :, spoiled] = 0
    assert_same_bits(got, want)


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 256])
@pytest.mark.parametrize("token", [4, 11])
def test_write_kv_rounds_rotated_keys_and_values_to_8_bits(
    isa: str, head_dim: int, token: int
) -> None:
    rng = np.random.default_rng(9)
    k, v = (rng.standard_normal(head_dim).astype(np.float32) for _ in range(2))
    k[3] = 500.0
    v[:2] = [-0.0, 3e38]
    got = kernels.write_kv(isa, k, v, token)
    scales = got[BLOCK * head_dim :].reshape(2, BLOCK)[:, token]
    for x, scale in zip((k @ rotation(head_dim), v.astype(np.float64)), scales, strict=True):
        assert abs(x).max() / 127 * (1 - 1e-6) <= from_bf16(scale) <= abs(x).max() / 127 * 1.01
    keys = Quantized(np.zeros((1, head_dim), np.int8), scales[:1])
    values = Quantized(np.zeros((1, head_dim), np.int8), scales[1:])
    for quantized, x in ((keys, k @ rotation(head_dim)), (values, v.astype(np.float64))):
        quantized.quants[0] = np.rint(x / from_bf16(quantized.scales)[0])
    want = np.zeros((1, head_halves(isa, head_dim)), np.uint16)
    write_quants(want, token, keys, values)
    difference = abs(got.view(np.int8).astype(int) - want[0].view(np.int8).astype(int))
    assert (difference <= 1).all()
    assert (difference == 1).sum() <= 1  # where the rotation in fp32 comes to a tie


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_write_kv_marks_what_is_not_finite_by_its_scale(isa: str, bad: float) -> None:
    k, v = np.ones(32, np.float32), np.ones(32, np.float32)
    k[5] = bad
    got = kernels.write_kv(isa, k, v, 2)
    assert np.isnan(from_bf16(got[BLOCK * 32 + 2]))
    v[31] = bad
    assert np.isnan(from_bf16(kernels.write_kv(isa, k, v, 2)[BLOCK * 32 + BLOCK + 2]))


@pytest.mark.parametrize("isa", INT8_ISAS)
@pytest.mark.parametrize("head_dim", [16, 48, 64, 96, 256])
def test_queries_are_rotated_and_rounded_to_8_bits(isa: str, head_dim: int) -> None:
    q = np.random.default_rng(10).standard_normal((5, head_dim)).astype(np.float32)
    q[1] = 0.0
    q[2] *= 1e-36
    prepared = kernels.prepare_queries(isa, q.reshape(-1), head_dim).reshape(q.shape)
    scales = prepared[:, head_dim // 4].astype(np.float64)
    got = prepared.view(np.int8)[:, :head_dim] * scales[:, None]
    want = q @ rotation(head_dim)
    assert (scales > 0).all()
    assert (scales <= np.maximum(abs(want).max(axis=1) / 127 * (1 + 1e-6), 2.0**-100)).all()
    assert (abs(got - want) <= scales[:, None] * 0.5001).all()
