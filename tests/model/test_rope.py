"""Rotary angles follow llama.cpp's meaning of the metadata."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.model.metadata import Metadata
from shoal.model.rope import RopeConfig, RopeScaling, read_rope_config, rope_tables


def read(**values: Any) -> RopeConfig:
    metadata = {f"llama.rope.{key.replace('__', '.')}": value for key, value in values.items()}
    return read_rope_config(Metadata(Path("m.gguf"), metadata), "llama", 16, 64)


def test_angles_are_exact_to_float32_far_out() -> None:
    cos, sin = rope_tables(read(), 10_000)
    for position, pair in ((9_999, 0), (9_999, 7), (1, 3)):
        angle = position * 10000.0 ** (-2 * pair / 16)
        assert cos[position, pair] == np.float32(math.cos(angle))
        assert sin[position, pair] == np.float32(math.sin(angle))


def test_a_factor_without_a_kind_is_linear() -> None:
    assert read(scaling__factor=4.0).scaling is RopeScaling.LINEAR
    assert read(scale_linear=4.0).factor == 4.0
    scaled, _ = rope_tables(read(scaling__factor=4.0), 41)
    plain, _ = rope_tables(read(), 11)
    np.testing.assert_array_equal(scaled[::4], plain)


def test_the_kind_none_ignores_a_factor() -> None:
    assert read(scaling__type="none", scaling__factor=4.0).factor == 1.0


def test_yarn_keeps_fast_pairs_divides_slow_ones_and_raises_the_magnitude() -> None:
    config = read(scaling__type="yarn", scaling__factor=4.0, freq_base=100.0)
    cos, sin = rope_tables(config, 2)
    magnitude = 1 + 0.1 * math.log(4.0)
    np.testing.assert_allclose(np.hypot(cos, sin), magnitude, rtol=1e-6)
    frequencies = np.arctan2(sin[1], cos[1])
    plain = 100.0 ** (-np.arange(8) / 8)
    assert frequencies[0] == pytest.approx(plain[0] / 1, rel=0.3)
    assert frequencies[-1] == pytest.approx(plain[-1] / 4, rel=1e-5)


def test_the_attention_factor_multiplies_cos_and_sin() -> None:
    cos, sin = rope_tables(read(scaling__attn_factor=1.5), 8)
    np.testing.assert_allclose(np.hypot(cos, sin), 1.5, rtol=1e-6)


def test_without_extrapolation_yarn_divides_every_pair() -> None:
    settings: dict[str, Any] = {"scaling__factor": 4.0}
    linear, _ = rope_tables(read(**settings), 9)
    settings |= {"scaling__type": "yarn", "scaling__yarn_ext_factor": 1e-9}
    yarn, _ = rope_tables(read(**settings), 9)
    np.testing.assert_allclose(yarn, linear * (1 + 0.1 * math.log(4.0)), atol=1e-6)
