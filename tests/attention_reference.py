"""Attention as NumPy computes it in float64, and sequences to compute it for.

"avx512" and "amx" multiply integers of 8 bits: they have a KV layout of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal._native import kernels

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
ISAS = kernels.instruction_sets()
BEST = ISAS[-1]
INT8_ISAS = [isa for isa in ISAS if isa in ("avx512", "amx")]
BLOCK = 16
EXP_ERROR = 1e-4  # of the exponential in int8, relative


def to_bf16(x: npt.ArrayLike) -> Halves:
    """The bits of the nearest bf16, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: npt.ArrayLike) -> Floats:
    return (np.asarray(bits, np.uint32) << 16).view(np.float32)


def rotation(head_dim: int) -> npt.NDArray[np.float64]:
    """Hadamard matrices along the diagonal, as large as the largest power of two that divides."""
    size = head_dim & -head_dim
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return np.kron(np.eye(head_dim // size), matrix)


@dataclass(frozen=True)
class Quantized:
    """Heads of 8 bits: quants [..., head_dim] and the bits of their scales in bf16 [...]."""

    quants: npt.NDArray[np.int8]
    scales: Halves

    @classmethod
    def of(cls, x: npt.NDArray[np.float64]) -> Quantized:
        largest = abs(x).max(axis=-1).astype(np.float32)
        scales = to_bf16(largest / np.float32(127) * np.float32(1 + 2**-8))
        with np.errstate(invalid="ignore"):
            quants = np.rint(x / from_bf16(scales)[..., None]).clip(-127, 127).astype(np.int8)
        return cls(quants, scales)

    def values(self) -> npt.NDArray[np.float64]:
        return self.quants.astype(np.float64) * from_bf16(self.scales)[..., None]


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
    """Keys and values [tokens, kv_heads, head_dim], exact in half; queries of the last tokens."""

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
        k=rng.standard_normal(kv_shape).astype(np.float16).astype(np.float32),
        v=rng.standard_normal(kv_shape).astype(np.float16).astype(np.float32),
    )


def as_seen_by(
    isa: str, heads: Heads, sequence: Sequence
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Queries, keys and values as the instruction set computes with them."""
    if isa not in INT8_ISAS:
        return tuple(x.astype(np.float64) for x in (sequence.q, sequence.k, sequence.v))
    dim = heads.head_dim
    matrix = rotation(dim)
    prepared = kernels.prepare_queries(isa, sequence.q.reshape(-1), dim).reshape(-1, dim)
    quants = prepared.view(np.int8)[:, :dim].astype(np.float64)
    q = (quants * prepared[:, dim // 4, None]).reshape(sequence.q.shape)
    k = Quantized.of(sequence.k @ matrix).values()
    return q, k / (dim & -dim), Quantized.of(sequence.v.astype(np.float64)).values()


def rounding_of_weights(
    weights: npt.NDArray[np.float64],
    first: int,
    values: Quantized,
    of_head: tuple[slice, int],
) -> npt.NDArray[np.float64]:
    """What rounding weights, times the scales of their values, may add to their sum with values.

    Their unit is at most 2^-12 of their sum over the chunk of 256 keys. Errors are no larger than
    the weights themselves; six standard deviations of what is left if their signs are random.
    """
    scaled = weights * from_bf16(values.scales[of_head])
    chunks = (first + np.arange(len(weights))) // 256
    units = (np.bincount(chunks, scaled) * 2**-12)[chunks]
    errors = np.minimum(units / 2, scaled)[:, None] * abs(values.quants[of_head].astype(np.float64))
    largest: npt.NDArray[np.float64] = np.minimum(
        errors.sum(axis=0), 6 * np.sqrt((errors**2).sum(axis=0))
    )
    return largest


def assert_near_reference(got: Floats, heads: Heads, sequence: Sequence, isa: str = BEST) -> None:
    """Compares with float64, given queries, keys and values as the instruction set rounds them.

    Attention in int8 rounds exponentials by EXP_ERROR, which moves the result by at most twice that
    times the mean of the values' magnitudes, and weights as `rounding_of_weights` says.
    """
    group = heads.num_heads // heads.num_kv_heads
    rows, keys, values = as_seen_by(isa, heads, sequence)
    scaled = Quantized.of(sequence.v.astype(np.float64))
    for i, queries in enumerate(rows):
        last = sequence.num_computed + i + 1
        first = max(0, last - heads.window) if heads.window else 0
        for head, q in enumerate(queries):
            k, v = keys[first:last, head // group], values[first:last, head // group]
            scores = k @ q * heads.scale
            if heads.soft_cap:
                scores = heads.soft_cap * np.tanh(scores / heads.soft_cap)
            weights = np.exp(scores - scores.max())
            total = weights.sum()
            want = weights / total @ v
            bound = heads.score_error * (1 + abs(want))
            if isa in INT8_ISAS:
                bound += 2 * EXP_ERROR * (weights / total @ abs(v))
                of_head = slice(first, last), head // group
                bound += rounding_of_weights(weights, first, scaled, of_head) / total
            assert (abs(got[i, head] - want) <= bound).all(), (i, head)


def head_halves(isa: str, head_dim: int) -> int:
    """Of a block's keys and values of one head, in units of two bytes."""
    return BLOCK * (head_dim + 2) if isa in INT8_ISAS else 2 * BLOCK * head_dim


def write_tokens(kv: Halves, isa: str, token: int, k: Floats, v: Floats) -> None:
    """Writes a token to a block: kv [kv_heads, head_halves], k and v [kv_heads, head_dim]."""
    heads, dim = k.shape
    if isa in INT8_ISAS:
        keys = Quantized.of(k @ rotation(dim))
        values = Quantized.of(v.astype(np.float64))
        write_quants(kv, token, keys, values)
        return
    key_part, value_part = kv[:, : BLOCK * dim], kv[:, BLOCK * dim :]
    key_part.reshape(heads, dim, BLOCK)[:, :, token] = k.astype(np.float16).view(np.uint16)
    value_part.reshape(heads, BLOCK, dim)[:, token] = v.astype(np.float16).view(np.uint16)


def write_quants(kv: Halves, token: int, keys: Quantized, values: Quantized) -> None:
    heads, dim = keys.quants.shape
    quants = kv[:, : BLOCK * dim].view(np.int8).reshape(heads, 2, BLOCK * dim)
    key_part = quants[:, 0].reshape(heads, dim // 4, BLOCK, 4)
    value_part = quants[:, 1].reshape(heads, dim // 16, BLOCK // 4, 16, 4)
    key_part[:, :, token] = keys.quants.reshape(heads, -1, 4)
    value_part[:, :, token // 4, :, token % 4] = values.quants.reshape(heads, -1, 16)
    kv[:, BLOCK * dim + token] = keys.scales
    kv[:, BLOCK * dim + BLOCK + token] = values.scales


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
    kv_shape = (len(block_ids), heads.num_kv_heads, head_halves(isa, heads.head_dim))
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
