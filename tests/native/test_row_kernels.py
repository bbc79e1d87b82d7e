"""Kernels over one row against NumPy in float64, and bit for bit across instruction sets."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from shoal._native import kernels

Floats = npt.NDArray[np.float32]
ISAS = kernels.instruction_sets()
WIDTHS = [1, 15, 16, 17, 64, 100, 576, 1000]


def random_row(width: int, seed: int, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(width) * scale).astype(np.float32)


def same_on_all(kernel: Callable[[str], Floats]) -> Floats:
    """The result of a kernel, after checking that all instruction sets agree in every bit."""
    first, *others = [kernel(isa) for isa in ISAS]
    for isa, other in zip(ISAS[1:], others, strict=True):
        np.testing.assert_array_equal(first.view(np.uint32), other.view(np.uint32), isa)
    return first


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(width: int) -> None:
    x, weight = random_row(width, 1, 3.0), random_row(width, 2)
    got = same_on_all(lambda isa: kernels.rms_norm(isa, x, weight, 1e-5))
    wide = x.astype(np.float64)
    want = wide / np.sqrt(np.mean(wide**2) + 1e-5) * weight
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-7)


def test_rms_norm_of_zeros_is_zero() -> None:
    zeros = np.zeros(40, np.float32)
    got = same_on_all(lambda isa: kernels.rms_norm(isa, zeros, np.ones_like(zeros), 1e-6))
    np.testing.assert_array_equal(got, zeros)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (80, 32), (48, 10)])
def test_rope(head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    num_heads, half = 3, rotary_dim // 2
    x = random_row(num_heads * head_dim, 3)
    angles = np.random.default_rng(4).uniform(-np.pi, np.pi, half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    got = same_on_all(lambda isa: kernels.rope(isa, x, cos, sin, head_dim, interleaved))

    want = x.astype(np.float64).reshape(num_heads, head_dim)
    pairs = np.arange(half)
    a, b = (2 * pairs, 2 * pairs + 1) if interleaved else (pairs, pairs + half)
    rotated = (want[:, a] + 1j * want[:, b]) * (cos.astype(np.float64) + 1j * sin)
    want[:, a], want[:, b] = rotated.real, rotated.imag
    np.testing.assert_allclose(got, want.reshape(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_gated_silu(width: int) -> None:
    gate, up = random_row(width, 5, 4.0), random_row(width, 6)
    got = same_on_all(lambda isa: kernels.gated_silu(isa, gate, up))
    wide = gate.astype(np.float64)
    np.testing.assert_allclose(got, wide / (1 + np.exp(-wide)) * up, rtol=1e-6, atol=1e-12)


def test_gated_silu_at_the_ends_of_exp() -> None:
    gate = np.array([-1e4, -200, -100, -87.5, 0.0, 87.5, 200, 1e4], np.float32)
    up = np.ones_like(gate)
    got = same_on_all(lambda isa: kernels.gated_silu(isa, gate, up))
    np.testing.assert_allclose(got, np.maximum(gate, 0), atol=1e-33)


@pytest.mark.parametrize("width", WIDTHS)
def test_add(width: int) -> None:
    x, y = random_row(width, 7), random_row(width, 8)
    np.testing.assert_array_equal(same_on_all(lambda isa: kernels.add(isa, x, y)), x + y)


@pytest.mark.parametrize("head_dim", [16, 64, 256])
def test_write_kv_transposes_keys_and_rounds_to_nearest_half(head_dim: int) -> None:
    k, v = random_row(head_dim, 9, 100.0), random_row(head_dim, 10, 1e-6)
    k[:8] = [0.0, -0.0, 65504.0, 65519.9, 65520.0, 1e30, 2.0**-24, 2.0**-25]
    offset = 5
    blocks = [kernels.write_kv(isa, k, v, offset) for isa in ISAS if isa not in ("avx512", "amx")]
    for block in blocks[1:]:
        np.testing.assert_array_equal(blocks[0], block)
    keys = blocks[0][: 16 * head_dim].reshape(head_dim, 16)
    values = blocks[0][16 * head_dim :].reshape(16, head_dim)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(keys[:, offset], k.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(values[offset], v.astype(np.float16).view(np.uint16))
    others = [i for i in range(16) if i != offset]
    assert not keys[:, others].any()
    assert not values[others].any()
