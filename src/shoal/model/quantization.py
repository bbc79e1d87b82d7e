"""Storage formats of weights, and their exact values as float32.

The block formats are those of GGML. A row is a sequence of blocks, and a block holds a few scales
and packed integers. Products and sums below are rounded once each, in the order written, so that
every executor that follows it gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.model.weights import WeightTensor, WeightType

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Blocks decoded at a time: bounds the temporaries to a few MiB.
_CHUNK_BLOCKS = 1 << 14


class BlockFormat(NamedTuple):
    """How a storage type packs a row: `elements` values in `num_bytes` bytes."""

    elements: int
    num_bytes: int
    decode: Callable[[Bytes], Floats]  # [blocks, num_bytes] -> [blocks, elements]


def dequantize(tensor: WeightTensor) -> Floats:
    """The values of `tensor` as float32, in its shape; a new array."""
    block_format = FORMATS[tensor.type]
    blocks = tensor.data.reshape(-1, block_format.num_bytes)
    values = np.empty((len(blocks), block_format.elements), np.float32)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        chunk = slice(start, start + _CHUNK_BLOCKS)
        values[chunk] = block_format.decode(np.ascontiguousarray(blocks[chunk]))
    return values.reshape(tensor.shape)


def num_bytes(weight_type: WeightType, num_elements: int) -> int:
    """Bytes of `num_elements` values, a whole number of blocks."""
    block_format = FORMATS[weight_type]
    return num_elements // block_format.elements * block_format.num_bytes


def _f32(blocks: Bytes) -> Floats:
    return blocks.view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return blocks.view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (blocks.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q8_0(blocks: Bytes) -> Floats:
    """Scale f16, then 32 x int8: d * q."""
    return _f16(blocks[:, :2].copy()) * blocks[:, 2:].view(np.int8)


def _q4_0(blocks: Bytes) -> Floats:
    """Scale f16, then 32 x 4 bits: d * (q - 8)."""
    return _f16(blocks[:, :2].copy()) * (_nibbles(blocks[:, 2:], 16).astype(np.int8) - np.int8(8))


def _q4_1(blocks: Bytes) -> Floats:
    """Scale and minimum f16, then 32 x 4 bits: d * q + m."""
    scale_min = _f16(blocks[:, :4].copy())
    return scale_min[:, :1] * _nibbles(blocks[:, 4:], 16) + scale_min[:, 1:]


def _q4_k(blocks: Bytes) -> Floats:
    """Two f16, 12 bytes of 6-bit scales and minima, 256 x 4 bits in 8 groups of 32."""
    scales, minima = _k_scales_minima(blocks)
    values = _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32)
    return (scales * values - minima).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> Floats:
    """As Q4_K, with the fifth bits of all 256 values in 32 bytes before the 4-bit parts.

    Bit g of byte i belongs to value i of group g.
    """
    scales, minima = _k_scales_minima(blocks)
    low = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> _shifts(range(8))) & 1
    return (scales * (low | (high << 4)) - minima).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> Floats:
    """Lower 4 bits of 256 values, upper 2 bits, 16 x int8 scales of groups of 16, one f16.

    Each half of 128 values has 64 bytes of lower parts (values 0-63 in the low nibbles, 64-127 in
    the high ones) and 32 bytes of upper parts (bits 2g and 2g + 1 belong to values 32g onwards).
    """
    low = _nibbles(blocks[:, :128], 64).reshape(-1, 8, 32)
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _shifts(range(0, 8, 2))
    high = (upper & 3).reshape(-1, 8, 32)
    values = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scales = _f16(blocks[:, 208:].copy()) * blocks[:, 192:208].view(np.int8)
    return (scales[:, :, None] * values.reshape(-1, 16, 16)).reshape(-1, 256)


def _nibbles(packed: Bytes, group: int) -> Bytes:
    """Of each `group` bytes first all low halves, then all high ones: [blocks, 2 * bytes]."""
    grouped = packed.reshape(len(packed), -1, 1, group)
    halves = (grouped >> _shifts((0, 4))) & np.uint8(15)
    return halves.reshape(len(packed), -1)


def _shifts(amounts: range | tuple[int, ...]) -> Bytes:
    return np.array(amounts, np.uint8)[:, None]


def _k_scales_minima(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scales and minima of the 8 groups of a Q4_K or Q5_K block, each [blocks, 8, 1].

    Six bits each. Groups 0-3 lie in the low six bits of bytes 0-3 (scales) and 4-7 (minima). Groups
    4-7 have their low four bits in the nibbles of bytes 8-11, and their upper two bits in the top
    of bytes 0-3 and 4-7.
    """
    first, second, third = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    factors = _f16(blocks[:, :4].copy())
    return (factors[:, :1] * scales)[:, :, None], (factors[:, 1:] * minima)[:, :, None]


FORMATS: dict[WeightType, BlockFormat] = {
    WeightType.F32: BlockFormat(1, 4, _f32),
    WeightType.F16: BlockFormat(1, 2, _f16),
    WeightType.BF16: BlockFormat(1, 2, _bf16),
    WeightType.Q8_0: BlockFormat(32, 34, _q8_0),
    WeightType.Q4_0: BlockFormat(32, 18, _q4_0),
    WeightType.Q4_1: BlockFormat(32, 20, _q4_1),
    WeightType.Q4_K: BlockFormat(256, 144, _q4_k),
    WeightType.Q5_K: BlockFormat(256, 176, _q5_k),
    WeightType.Q6_K: BlockFormat(256, 210, _q6_k),
}
"""The layout of each storage type (GGML's `ggml-common.h` defines them)."""
