"""Dequantised values equal those of the `gguf` package bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import TinyModel, write_tiny_model
from hypothesis import given
from hypothesis import strategies as st

from shoal.model.gguf import GGUFFile
from shoal.model.quantization import FORMATS, dequantize, num_bytes
from shoal.model.weights import WeightTensor, WeightType


@pytest.mark.parametrize("weight_type", list(WeightType))
def test_random_blocks_equal_the_gguf_packages(weight_type: WeightType) -> None:
    block_format = FORMATS[weight_type]
    rng = np.random.default_rng(1)
    shape = (40_000 // block_format.elements, 2 * block_format.elements)
    packed = rng.integers(0, 256, num_bytes(weight_type, shape[0] * shape[1]), dtype=np.uint8)
    expected = _gguf_dequantize(packed.reshape(shape[0], -1), weight_type)
    with np.errstate(all="ignore"):
        values = dequantize(WeightTensor("w", shape, weight_type, packed))
    assert values.shape == shape
    assert values.dtype == np.float32
    _assert_same_bits(values, expected)


@given(packed=st.binary(min_size=210, max_size=210))
def test_any_q6_k_block_equals_the_gguf_packages(packed: bytes) -> None:
    block = np.frombuffer(packed, np.uint8)
    expected = _gguf_dequantize(block, WeightType.Q6_K)
    with np.errstate(all="ignore"):
        values = dequantize(WeightTensor("w", (256,), WeightType.Q6_K, block))
    _assert_same_bits(values, expected)


@pytest.mark.parametrize("weight_type", list(WeightType))
def test_files_of_every_type_read_as_the_gguf_package_reads_them(
    tmp_path: Path, weight_type: WeightType
) -> None:
    model = TinyModel(weight_type=weight_type, hidden_size=256, intermediate_size=512, num_layers=1)
    path = write_tiny_model(tmp_path / "tiny.gguf", model)
    file, peer = GGUFFile.open(path), gguf.GGUFReader(path)
    assert file.tensors["blk.0.ffn_up.weight"].type is weight_type
    for tensor in peer.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(dequantize(file.tensors[tensor.name]), expected)


def test_the_real_model_reads_as_the_gguf_package_reads_it(model_path: Path) -> None:
    file, peer = GGUFFile.open(model_path), gguf.GGUFReader(model_path)
    for tensor in peer.tensors[:12]:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(dequantize(file.tensors[tensor.name]), expected)


def test_an_empty_tensor_has_no_values() -> None:
    tensor = WeightTensor("w", (0, 32), WeightType.Q8_0, np.empty(0, np.uint8))
    assert dequantize(tensor).shape == (0, 32)


def _gguf_dequantize(
    packed: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], weight_type: WeightType
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    with np.errstate(all="ignore"):
        values: np.ndarray[tuple[int, ...], np.dtype[np.float32]] = gguf.dequantize(
            packed, gguf.GGMLQuantizationType[weight_type.name]
        )
    return values


def _assert_same_bits(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    expected: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> None:
    """Equal bit for bit; any NaN equals any other, and random scales make some."""
    is_nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(values), is_nan)
    assert values[~is_nan].tobytes() == expected[~is_nan].tobytes()
