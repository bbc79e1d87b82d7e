"""Linear layers against NumPy in float64; bit for bit across rows, threads and instruction sets.

AMX multiplies in bf16 and so has bits of its own; all other sets share theirs.
"""

import numpy as np
import numpy.typing as npt
import pytest
from gguf_files import quantize

from shoal._native import kernels
from shoal.model.quantization import dequantize
from shoal.model.weights import WeightTensor, WeightType

Floats = npt.NDArray[np.float32]
ISAS = kernels.instruction_sets()
INTEGER_ISAS = [isa for isa in ISAS if isa != "amx"]
OUTPUTS, INPUTS = 83, 512  # the last tile of 16 outputs is not full; two blocks of a K-quant
MANY_INPUTS = 1280  # on AMX three parts
DENSE = (WeightType.F32, WeightType.F16, WeightType.BF16)
QUANTIZED = tuple(kind for kind in WeightType if kind not in DENSE)
SIMPLE = (WeightType.Q4_0, WeightType.Q4_1, WeightType.Q8_0)  # in blocks of 32
# Around the row blocks of the kernels (2, 5, 16 and 32), the most rows that read tiles as they are
# packed (12), and beyond one task (128, on AMX 1,024, and 384 of MANY_INPUTS).
ROWS = (1, 2, 3, 5, 6, 7, 12, 13, 15, 16, 17, 23, 31, 32, 33, 36, 37, 49, 130, 530)

needs_amx = pytest.mark.skipif("amx" not in ISAS, reason="this processor has no AMX")


def random_rows(rows: int, inputs: int = INPUTS) -> Floats:
    rng = np.random.default_rng(3)
    # Groups of unlike size, as activations have them, and one of zeros.
    spread = np.repeat(np.exp(rng.standard_normal((rows, inputs // 32))), 32, axis=1)
    spread[:, 32:64] = 0
    return (rng.standard_normal((rows, inputs)) * spread).astype(np.float32)


def random_weight(kind: WeightType, inputs: int = INPUTS) -> WeightTensor:
    values = np.random.default_rng(7).standard_normal((OUTPUTS, inputs)).astype(np.float32)
    return weight_of(values * 0.1, kind)


def weight_of(values: Floats, kind: WeightType) -> WeightTensor:
    data = np.ascontiguousarray(quantize(values, kind)).view(np.uint8).reshape(-1)
    return WeightTensor("w", values.shape, kind, data)


def multiply(
    weight: WeightTensor,
    x: Floats,
    *,
    isa: str = INTEGER_ISAS[-1],
    threads: int = 1,
    wide: bool = False,
    first_wide: int | None = None,
) -> Floats:
    if first_wide is None:
        first_wide = 0 if wide else OUTPUTS
    y: Floats = kernels.linear(
        isa, threads, weight.type.value, weight.data, OUTPUTS, x.reshape(-1), len(x), first_wide
    )
    return y.reshape(len(x), OUTPUTS)


def relative_error(got: Floats, weight: WeightTensor, x: Floats) -> float:
    want = x.astype(np.float64) @ dequantize(weight).astype(np.float64).T
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def quantized_as_documented(x: Floats, wide: bool) -> npt.NDArray[np.float64]:
    groups = x.astype(np.float64).reshape(len(x), -1, 32)
    of_group = np.abs(groups).max(axis=-1, keepdims=True)
    of_row = of_group.max(axis=1, keepdims=True)
    of_group[of_group == 0] = of_row.min()
    halvings = np.floor(np.log2(of_row / of_group))
    scale = of_row / 127 / 2**halvings
    if wide:  # four bits more in the largest groups
        scale /= np.where(halvings == 0, 16, 1)
    return (np.rint(groups / scale) * scale).reshape(x.shape)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("wide", [False, True])
def test_a_product_is_that_of_the_quantised_activations(kind: WeightType, wide: bool) -> None:
    weight, x = random_weight(kind), random_rows(7)
    want = quantized_as_documented(x, wide) @ dequantize(weight).astype(np.float64).T
    got = multiply(weight, x, wide=wide)
    # Sums over groups and scales are rounded to int16, and a value between two levels may round
    # either way in fp32. All that is a tenth of what eight bits cost.
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 6e-4


@pytest.mark.parametrize("kind", QUANTIZED)
def test_eight_bits_cost_less_than_one_per_cent_and_twelve_in_the_largest_groups_a_third_less(
    kind: WeightType,
) -> None:
    weight, x = random_weight(kind), random_rows(9)
    error = relative_error(multiply(weight, x), weight, x)
    assert error < 1e-2
    assert relative_error(multiply(weight, x, wide=True), weight, x) < error * 2 / 3


@pytest.mark.parametrize("isa", INTEGER_ISAS)
@pytest.mark.parametrize("kind", QUANTIZED)
def test_outputs_before_the_first_wide_one_have_eight_bits(kind: WeightType, isa: str) -> None:
    weight, x = random_weight(kind), random_rows(7)
    narrow, wide = (multiply(weight, x, isa=isa, wide=wide) for wide in (False, True))
    got = multiply(weight, x, isa=isa, first_wide=64)
    np.testing.assert_array_equal(got[:, :64], narrow[:, :64])
    np.testing.assert_array_equal(got[:, 64:], wide[:, 64:])
    assert not np.array_equal(narrow[:, :64], wide[:, :64])


def rounded_to_bf16(x: Floats) -> Floats:
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def cut_to_bf16(x: npt.NDArray[np.float16]) -> npt.NDArray[np.float64]:
    return (x.view(np.uint16) & 0xFFF8).view(np.float16).astype(np.float64)


@needs_amx
@pytest.mark.parametrize("kind", QUANTIZED)
def test_amx_multiplies_weights_cut_to_bf16_with_rounded_activations(kind: WeightType) -> None:
    weight, x = random_weight(kind), random_rows(40)
    unit = 2.0**10  # so that no weight is too small for a normal half
    w = cut_to_bf16((dequantize(weight) * unit).astype(np.float16)) / unit
    factor = np.float32(1 + 2**-8 * 0.7213475)  # for what cutting takes away on average
    want = rounded_to_bf16(x * factor).astype(np.float64) @ w.T
    got = multiply(weight, x, isa="amx")
    # Scales of K-quants are rounded to half precision, so that some weights are cut elsewhere.
    limit = 2e-3 if kind.value.endswith("_K") else 3e-4
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < limit


@needs_amx
@pytest.mark.parametrize("kind", QUANTIZED)
def test_bf16_costs_less_than_half_a_per_cent(kind: WeightType) -> None:
    weight, x = random_weight(kind), random_rows(40)
    assert relative_error(multiply(weight, x, isa="amx"), weight, x) < 5e-3


@needs_amx
def test_amx_takes_weights_and_activations_of_any_size() -> None:
    weight = random_weight(WeightType.F32)
    values = dequantize(weight)
    for size in (1e-3, 1.0, 2000.0):
        scaled = weight_of(values * np.float32(size), WeightType.Q8_0)
        x = random_rows(3) * np.float32(1 / size)
        assert relative_error(multiply(scaled, x, isa="amx"), scaled, x) < 5e-3


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("isa", ISAS)
def test_the_look_up_gives_the_rows_of_the_file(isa: str, kind: WeightType) -> None:
    weight = random_weight(kind)
    got = kernels.dequantize_rows(isa, kind.value, weight.data, OUTPUTS, INPUTS)
    want = dequantize(weight)
    # Scales and mins are rounded to int16 of a unit for each row; on AMX, mins and the scales of
    # K-quants to half precision.
    is_rounded = kind.value == "Q4_1" or kind.value.endswith("_K")
    unit = 2**-14 if isa != "amx" else 2**-10 if is_rounded else 2**-23
    limit = np.abs(want).max() * unit
    np.testing.assert_allclose(got.reshape(want.shape), want, rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [(kind, MANY_INPUTS) for kind in QUANTIZED]
    + [(kind, inputs) for kind in SIMPLE for inputs in (32, 96, 1056, 2080)],
)
@pytest.mark.parametrize("wide", [False, True])
def test_any_number_of_groups_is_multiplied(kind: WeightType, inputs: int, wide: bool) -> None:
    weight, x = random_weight(kind, inputs), random_rows(7, inputs)
    got = multiply(weight, x, wide=wide)
    assert relative_error(got, weight, x) < 1e-2
    for isa in INTEGER_ISAS:
        assert_same_bits(rows_alone(weight, x, isa, wide), got, isa)


# Outputs have 31 bits, of which the sum over more columns needs more.
@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("inputs", "size"),
    [(512, 30), (512, 100), (512, 1000), (512, 10_000), (4096, 1000), (14336, 300)],
)
def test_large_activations_leave_the_others_their_bits(
    kind: WeightType, wide: bool, inputs: int, size: float
) -> None:
    values = np.random.default_rng(7).standard_normal((OUTPUTS, inputs)).astype(np.float32)
    values[:, 64:96] = 0  # so that only the others are seen
    weight = weight_of(values, kind)
    x = np.random.default_rng(3).standard_normal((7, inputs)).astype(np.float32)
    x[:, 64:96] *= np.float32(size)
    got = multiply(weight, x, wide=wide)
    assert relative_error(got, weight, x) < 1e-2
    for isa in INTEGER_ISAS:
        assert_same_bits(rows_alone(weight, x, isa, wide), got, isa)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("wide", [False, True])
def test_what_is_not_finite_stays_in_its_row(kind: WeightType, wide: bool) -> None:
    weight, x = random_weight(kind), random_rows(17)
    for isa in INTEGER_ISAS:
        want = multiply(weight, x, isa=isa, wide=wide)
        for row, number in ((2, np.nan), (5, np.inf), (11, -np.inf)):
            poisoned = x.copy()
            poisoned[row, 70] = number
            got = multiply(weight, poisoned, isa=isa, wide=wide)
            assert np.isnan(got[row]).all()
            others = np.arange(len(x)) != row
            assert_same_bits(got[others], want[others], (isa, row))


@pytest.mark.parametrize("kind", SIMPLE)
@pytest.mark.parametrize("wide", [False, True])
# Those a thousand times smaller have five bits of scale left.
@pytest.mark.parametrize(("seen", "limit"), [(0, 1e-2), (1, 1e-2), (2, 4e-2)])
def test_weights_keep_their_bits_beside_ones_ten_to_a_thousand_times_larger(
    kind: WeightType, wide: bool, seen: int, limit: float
) -> None:
    values = np.random.default_rng(7).standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    sizes = np.repeat(np.array([1, 0.1, 0.01, 10], np.float32), 32)
    weight = weight_of(values * np.resize(sizes, INPUTS), kind)
    x = np.random.default_rng(3).standard_normal((7, INPUTS)).astype(np.float32)
    x[:, np.resize(np.repeat(np.arange(4), 32), INPUTS) != seen] = 0
    got = multiply(weight, x, wide=wide)
    assert relative_error(got, weight, x) < limit
    for isa in INTEGER_ISAS:
        assert_same_bits(rows_alone(weight, x, isa, wide), got, isa)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("wide", [False, True])
def test_rows_of_zeros_give_zeros_among_others(kind: WeightType, wide: bool) -> None:
    # Groups are quantised 8 at a time or one by one; 1,056 columns need both.
    for inputs in (32, 1056, INPUTS) if kind in SIMPLE else (INPUTS,):
        weight, x = random_weight(kind, inputs), random_rows(7, inputs)
        want = multiply(weight, x, wide=wide)
        x[3], x[5], want[3], want[5] = 0, 1e-30, 0, 0
        for isa in INTEGER_ISAS:
            got = multiply(weight, x, isa=isa, wide=wide)
            assert_same_bits(np.abs(got), np.abs(want), (isa, inputs))


def block_at_limits(kind: str, quant: int) -> tuple[npt.NDArray[np.uint8], float]:
    """A block of equal weights, and the weight. A min adds to the quants as much as fits int16."""
    size, halves, fill = {
        "Q8_0": (34, {0: 1}, quant),
        "Q4_0": (18, {0: 1}, quant * 0x11),
        "Q4_1": (20, {0: 3750, 2: -60_000}, 0),
        "Q4_K": (144, {0: 100, 2: 1600}, 0),
        "Q5_K": (176, {0: 100, 2: 2400}, 0),
        "Q6_K": (210, {208: 1}, 0),
    }[kind]
    block = np.full(size, fill & 0xFF, np.uint8)
    for place, half in halves.items():
        block[place : place + 2] = np.array([half], np.float16).view(np.uint8)
    if kind in ("Q4_K", "Q5_K"):
        block[4:16] = 0xFF  # scales and mins of 63
    if kind == "Q6_K":
        block[192:208] = 127
    tensor = WeightTensor("w", (1, 32 if size < 100 else 256), WeightType(kind), block)
    weights = dequantize(tensor)
    assert (weights == weights[0, 0]).all()
    return block, float(weights[0, 0])


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("inputs", [256, 4096, 8192])
@pytest.mark.parametrize(
    ("kind", "quant"),
    [
        *(("Q8_0", quant) for quant in (127, -128)),
        *(("Q4_0", quant) for quant in (0, 15)),
        *((kind, 0) for kind in ("Q4_1", "Q4_K", "Q5_K", "Q6_K")),
    ],
)
def test_the_largest_sums_fit(kind: str, quant: int, inputs: int, sign: int, wide: bool) -> None:
    # All quants, mins and activations at their ends.
    block, weight = block_at_limits(kind, quant)
    outputs = 32
    blocks = np.tile(block, outputs * inputs // (32 if len(block) < 100 else 256))
    x = np.full((3, inputs), sign * 127.0, np.float32)
    results = [
        kernels.linear(isa, 1, kind, blocks, outputs, x.reshape(-1), 3, 0 if wide else outputs)
        for isa in INTEGER_ISAS
    ]
    # The sum that is multiplied with a min may be short of one in 16,000.
    rtol = 1e-4 if kind in ("Q4_1", "Q4_K", "Q5_K") else 1e-6
    np.testing.assert_allclose(results[0], weight * sign * 127.0 * inputs, rtol=rtol)
    for isa, got in zip(INTEGER_ISAS, results, strict=True):
        assert_same_bits(got, results[0], isa)


@pytest.mark.parametrize("kind", DENSE)
def test_dense_weights_are_multiplied_in_fp32(kind: WeightType) -> None:
    weight, x = random_weight(kind), random_rows(9)
    assert relative_error(multiply(weight, x), weight, x) < 2e-6


@pytest.mark.parametrize("kind", list(WeightType))
@pytest.mark.parametrize("wide", [False, True])
def test_rows_threads_and_instruction_sets_change_no_bit(kind: WeightType, wide: bool) -> None:
    weight, x = random_weight(kind), random_rows(max(ROWS))
    alone = rows_alone(weight, x, INTEGER_ISAS[-1], wide)
    for isa in INTEGER_ISAS:
        for rows in ROWS if isa != "portable" else ROWS[:8]:
            got = multiply(weight, x[:rows], isa=isa, threads=1 + rows % 2, wide=wide)
            assert_same_bits(got, alone[:rows], (isa, rows))


@needs_amx
@pytest.mark.parametrize("inputs", [INPUTS, MANY_INPUTS])
@pytest.mark.parametrize("kind", list(WeightType))
def test_rows_and_threads_change_no_bit_on_amx(kind: WeightType, inputs: int) -> None:
    weight, x = random_weight(kind, inputs), random_rows(max(ROWS), inputs)
    alone = rows_alone(weight, x, "amx", False)
    for rows in ROWS:
        for threads in (1, 2, 3):  # which share out rows, if there are 128 for each
            got = multiply(weight, x[:rows], isa="amx", threads=threads)
            assert_same_bits(got, alone[:rows], (rows, threads))


def rows_alone(weight: WeightTensor, x: Floats, isa: str, wide: bool) -> Floats:
    return np.concatenate([multiply(weight, row[None], isa=isa, wide=wide) for row in x])


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("inputs", [INPUTS, 14336])
def test_extreme_activations_stay_finite(kind: WeightType, inputs: int) -> None:
    x = random_rows(17, inputs)
    x[0, :32], x[1, 64:96] = 1e-38, 1e-31
    weight = random_weight(kind, inputs)
    for isa in ISAS:
        x[2, 128] = 3e38 if isa != "amx" else 1e9
        assert np.isfinite(multiply(weight, x, isa=isa)).all()


def assert_same_bits(got: Floats, want: Floats, where: object) -> None:
    assert np.array_equal(got.view(np.uint32), want.view(np.uint32)), where


# Where a block of each type keeps its scales and minima, or a weight: two bytes of a float.
FLOAT_PLACES = {
    WeightType.F32: (4, 2),
    WeightType.F16: (2, 0),
    WeightType.BF16: (2, 0),
    WeightType.Q4_0: (18, 0),
    WeightType.Q8_0: (34, 0),
    WeightType.Q4_1: (20, 0, 2),
    WeightType.Q4_K: (144, 0, 2),
    WeightType.Q5_K: (176, 0, 2),
    WeightType.Q6_K: (210, 208),
}


@pytest.mark.parametrize("isa", INTEGER_ISAS[-1:] + [isa for isa in ISAS if isa == "amx"])
@pytest.mark.parametrize("kind", WeightType)
def test_a_weight_that_is_not_finite_is_refused(kind: WeightType, isa: str) -> None:
    block_bytes, *places = FLOAT_PLACES[kind]
    x = random_rows(1)
    for place in places:
        weight = random_weight(kind)
        infinity = 0x7F80 if kind in (WeightType.F32, WeightType.BF16) else 0xFC00
        weight.data.reshape(-1, block_bytes)[-1, place : place + 2].view(np.uint16)[:] = infinity
        with pytest.raises(ValueError, match="a weight is not finite"):
            multiply(weight, x, isa=isa)
