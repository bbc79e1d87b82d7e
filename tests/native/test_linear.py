"""Linear layers against NumPy in float64; bit for bit across instruction sets, rows and threads."""

import numpy as np
import numpy.typing as npt
import pytest
from gguf_files import quantize

from shoal._native import kernels
from shoal.model.quantization import dequantize
from shoal.model.weights import WeightTensor, WeightType

Floats = npt.NDArray[np.float32]
ISAS = kernels.instruction_sets()
BEST = ISAS[-1]
OUTPUTS, INPUTS = 83, 512  # the last tile of 16 outputs is not full; two blocks of a K-quant
DENSE = (WeightType.F32, WeightType.F16, WeightType.BF16)
QUANTIZED = tuple(kind for kind in WeightType if kind not in DENSE)
# Around the row blocks of the kernels (2, 6 and 16) and beyond one task (128).
ROWS = (1, 2, 3, 5, 6, 7, 15, 16, 17, 23, 33, 130)


def random_rows(rows: int, seed: int = 3) -> Floats:
    rng = np.random.default_rng(seed)
    # Groups of unlike size, as activations have them, and one of zeros.
    spread = np.repeat(np.exp(rng.standard_normal((rows, INPUTS // 32))), 32, axis=1)
    spread[:, 32:64] = 0
    return (rng.standard_normal((rows, INPUTS)) * spread).astype(np.float32)


def random_weight(kind: WeightType) -> WeightTensor:
    values = np.random.default_rng(7).standard_normal((OUTPUTS, INPUTS)).astype(np.float32) * 0.1
    data = np.ascontiguousarray(quantize(values, kind)).view(np.uint8).reshape(-1)
    return WeightTensor("w", (OUTPUTS, INPUTS), kind, data)


def multiply(
    weight: WeightTensor, x: Floats, *, isa: str = BEST, threads: int = 1, wide: bool = False
) -> Floats:
    outputs = weight.shape[0]
    y: Floats = kernels.linear(
        isa, threads, weight.type.value, weight.data, outputs, x.reshape(-1), len(x), wide
    )
    return y.reshape(len(x), outputs)


def relative_error(got: Floats, weight: WeightTensor, x: Floats) -> float:
    want = x.astype(np.float64) @ dequantize(weight).astype(np.float64).T
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def largest_of_rows(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    largest = np.abs(values).max(axis=-1, keepdims=True)
    return np.where(largest == 0, 1, largest)


def quantized_as_documented(x: Floats) -> npt.NDArray[np.float64]:
    scale = largest_of_rows(x.astype(np.float64)) / 8191
    return np.rint(x / scale) * scale


@pytest.mark.parametrize("kind", QUANTIZED)
def test_sixteen_bits_lose_little_but_what_the_activations_lose(kind: WeightType) -> None:
    weight, x = random_weight(kind), random_rows(7)
    want = quantized_as_documented(x) @ dequantize(weight).astype(np.float64).T
    got = multiply(weight, x, wide=True)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 1e-3


@pytest.mark.parametrize("kind", QUANTIZED)
def test_eight_bits_are_those_of_the_largest_weight_of_a_row(kind: WeightType) -> None:
    weight, x = random_weight(kind), random_rows(7)
    exact = dequantize(weight).astype(np.float64)
    step = largest_of_rows(exact) / 127
    noise = np.linalg.norm(x, axis=1)[:, None] * step.T / np.sqrt(12)  # as rounding scatters
    errors = (multiply(weight, x) - x.astype(np.float64) @ exact.T) / noise
    # K-quants have room for weights that no quant takes: their steps may be larger.
    assert 0.8 < np.sqrt(np.mean(errors**2)) < 1.5
    assert relative_error(multiply(weight, x), weight, x) < 1.2e-2


def test_a_large_column_takes_precision_from_its_segment_alone() -> None:
    """Of 1,312 columns, three segments, the last filled up with padding."""
    rng = np.random.default_rng(5)
    values = rng.standard_normal((OUTPUTS, 1312)).astype(np.float32)
    values[:, :448] = 0
    data = np.ascontiguousarray(quantize(values, WeightType.Q8_0)).view(np.uint8).reshape(-1)
    weight = WeightTensor("w", values.shape, WeightType.Q8_0, data)
    x = rng.standard_normal((20, 1312)).astype(np.float32)
    x[:, 0] = 1e4
    want = multiply(weight, x, wide=True)
    assert relative_error(want, weight, x) < 1e-3
    for isa in ISAS:
        assert_same_bits(multiply(weight, x, isa=isa, wide=True), want, isa)


@pytest.mark.parametrize("kind", DENSE)
def test_dense_weights_are_multiplied_in_fp32(kind: WeightType) -> None:
    weight, x = random_weight(kind), random_rows(9)
    assert relative_error(multiply(weight, x), weight, x) < 2e-6


@pytest.mark.parametrize("kind", list(WeightType))
@pytest.mark.parametrize("wide", [False, True])
def test_rows_threads_and_instruction_sets_change_no_bit(kind: WeightType, wide: bool) -> None:
    weight, x = random_weight(kind), random_rows(max(ROWS))
    alone = np.concatenate([multiply(weight, row[None], wide=wide) for row in x])
    for isa in ISAS:
        for rows in ROWS if isa != "portable" else ROWS[:8]:
            got = multiply(weight, x[:rows], isa=isa, threads=1 + rows % 2, wide=wide)
            assert_same_bits(got, alone[:rows], (isa, rows))


def test_extreme_activations_stay_finite() -> None:
    x = random_rows(17)
    x[0, :32], x[1, 64:96], x[2, 128] = 1e-38, 1e-31, 3e37
    weight = random_weight(WeightType.Q4_0)
    for isa in ISAS:
        assert np.isfinite(multiply(weight, x, isa=isa)).all()


def assert_same_bits(got: Floats, want: Floats, where: object) -> None:
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), where
