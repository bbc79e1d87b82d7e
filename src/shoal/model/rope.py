"""Rotary position embedding: the angles of a model, computed once in float64.

The scaling variants and their metadata keys are those that GGUF files carry; the meaning of each
follows llama.cpp, which defines them in practice.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shoal.model.errors import ModelFileError
from shoal.model.metadata import Metadata
from shoal.model.quantization import dequantize
from shoal.model.weights import WeightTensor

DEFAULT_BASE = 10000.0


class RopeScaling(enum.StrEnum):
    """How a context longer than the trained one is mapped onto the trained angles."""

    NONE = "none"
    LINEAR = "linear"  # all positions divided by the factor
    YARN = "yarn"  # only the slow dimensions, blended (Peng et al., 2023)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotary embedding of a model; `factor` and what follows serve the scaling alone."""

    rotary_dim: int
    base: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    attention_factor: float = 1.0  # multiplies cos and sin
    original_context_length: int = 0
    extrapolation_mix: float = 1.0  # share of the blend that YaRN applies
    beta_fast: float = 32.0  # turns within the original context above which nothing is scaled
    beta_slow: float = 1.0  # turns below which everything is


def read_rope_config(
    metadata: Metadata, architecture: str, head_dim: int, context_length: int
) -> RopeConfig:
    """The rotary embedding that the metadata of an `architecture` describe.

    Raises:
        ModelFileError: a value is out of range or the kind of scaling isn't supported.
    """
    prefix = f"{architecture}.rope"
    key = f"{prefix}.dimension_count"
    rotary_dim = metadata.integer(key, head_dim, maximum=head_dim)
    if rotary_dim % 2:
        raise metadata.fail(f"{key} must be even, got {rotary_dim}")
    scaling = _scaling(metadata, f"{prefix}.scaling.type")
    legacy_factor = metadata.number(f"{prefix}.scale_linear", 1.0)
    factor = metadata.number(f"{prefix}.scaling.factor", legacy_factor)
    base = metadata.number(f"{prefix}.freq_base", DEFAULT_BASE)
    if base <= 1.0:
        raise metadata.fail(f"{prefix}.freq_base must be above 1, got {base}")
    return RopeConfig(
        rotary_dim=rotary_dim,
        base=base,
        scaling=scaling,
        factor=factor if scaling is not RopeScaling.NONE else 1.0,
        attention_factor=metadata.number(f"{prefix}.scaling.attn_factor", 1.0),
        original_context_length=metadata.integer(
            f"{prefix}.scaling.original_context_length", context_length
        ),
        extrapolation_mix=metadata.number(f"{prefix}.scaling.yarn_ext_factor", 1.0),
        beta_fast=metadata.number(f"{prefix}.scaling.yarn_beta_fast", 32.0),
        beta_slow=metadata.number(f"{prefix}.scaling.yarn_beta_slow", 1.0),
    )


def _scaling(metadata: Metadata, key: str) -> RopeScaling:
    # A factor without a kind means linear: files from before the kinds carry it alone.
    name = metadata.string(key, RopeScaling.LINEAR)
    try:
        return RopeScaling(name)
    except ValueError:
        raise metadata.fail(f"{key} is {name!r}; supported are {', '.join(RopeScaling)}") from None


def rope_tables(
    config: RopeConfig,
    num_positions: int,
    frequency_factors: WeightTensor | None = None,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines of all angles, each float32 [num_positions, rotary_dim / 2].

    `frequency_factors` [rotary_dim / 2] divide the frequencies (Llama 3.1 stores its scaling so).

    Raises:
        ModelFileError: a frequency factor isn't finite and above 0.
    """
    frequencies = _frequencies(config, frequency_factors)
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
    magnitude = _magnitude(config)
    cos = (np.cos(angles) * magnitude).astype(np.float32)
    sin = (np.sin(angles) * magnitude).astype(np.float32)
    return cos, sin


def _frequencies(
    config: RopeConfig, frequency_factors: WeightTensor | None
) -> npt.NDArray[np.float64]:
    """Radians that each pair of dimensions turns with one position."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float64) / config.rotary_dim
    frequencies = config.base**-exponents
    if frequency_factors is not None:
        factors = dequantize(frequency_factors)
        if not (np.isfinite(factors) & (factors > 0)).all():
            raise ModelFileError(f"{frequency_factors.name} must be finite and above 0: {factors}")
        frequencies /= factors.astype(np.float64)
    scaled = frequencies / config.factor
    if config.scaling is not RopeScaling.YARN:
        return scaled
    keep = _yarn_ramp(config) * config.extrapolation_mix
    blended: npt.NDArray[np.float64] = scaled * (1 - keep) + frequencies * keep
    return blended


def _yarn_ramp(config: RopeConfig) -> npt.NDArray[np.float64]:
    """1 for pairs that turn often within the original context, 0 for the slow ones."""
    low = max(0.0, math.floor(_pair_with_turns(config, config.beta_fast)))
    high = min(config.rotary_dim - 1.0, math.ceil(_pair_with_turns(config, config.beta_slow)))
    pairs = np.arange(config.rotary_dim // 2, dtype=np.float64)
    ramp: npt.NDArray[np.float64] = (pairs - low) / max(0.001, high - low)
    return 1.0 - np.clip(ramp, 0.0, 1.0)


def _pair_with_turns(config: RopeConfig, turns: float) -> float:
    """The (fractional) pair of dimensions that turns `turns` times in the original context."""
    wavelengths = config.original_context_length / (turns * 2 * math.pi)
    return config.rotary_dim * math.log(wavelengths) / (2 * math.log(config.base))


def _magnitude(config: RopeConfig) -> float:
    if config.scaling is RopeScaling.YARN and config.factor > 1.0:
        return config.attention_factor * (1.0 + 0.1 * math.log(config.factor))
    return config.attention_factor
