"""Tiny Llama models that differ in one respect each, and the tokens they are asked about.

`make_llama.py` computes their logits with HF transformers; tests/model/test_llama.py compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gguf_files import TinyModel

CONTEXT_LENGTH = 512
NUM_TOKENS = 300  # well past the original contexts of 32 and 64 below
POSITIONS = (0, 1, 31, 64, 150, 299)  # whose logits are kept

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "context_length": CONTEXT_LENGTH}


@dataclass(frozen=True, slots=True)
class Variant:
    """A model, and the settings of HF's LlamaConfig that the sizes alone don't imply."""

    model: TinyModel
    hf_settings: dict[str, Any] = field(default_factory=dict)


def llama3_factors(head_dim: int, base: float, scaling: dict[str, float]) -> list[float]:
    """What `rope_freqs.weight` holds for Llama 3.1's scaling, as its converter computes it."""
    factors = []
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * base ** (2 * index / head_dim)
        turns = scaling["original_max_position_embeddings"] / wavelength
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return factors


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"factor": 8.0, "original_max_position_embeddings": 64}


def _scaling(kind: str, **values: float) -> dict[str, Any]:
    return {f"llama.rope.scaling.{key}": value for key, value in {"type": kind, **values}.items()}


VARIANTS = {
    "plain": Variant(TinyModel(**_SMALL, num_heads=2, num_kv_heads=2)),
    "untied": Variant(TinyModel(**_SMALL, tied=False)),
    "grouped_queries": Variant(TinyModel(**_SMALL, num_heads=8, num_kv_heads=2)),
    "wide_heads": Variant(TinyModel(**_SMALL, num_heads=4, num_kv_heads=1, head_dim=24)),
    "biases": Variant(TinyModel(**_SMALL, biases=True), {"attention_bias": True, "mlp_bias": True}),
    "padded_vocabulary": Variant(TinyModel(**_SMALL, vocab_padding=13)),
    "rope_linear": Variant(
        TinyModel(**_SMALL, metadata=_scaling("linear", factor=4.0)),
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "rope_yarn": Variant(
        TinyModel(
            **_SMALL,
            head_dim=32,
            metadata=_scaling("yarn", factor=8.0, original_context_length=64),
        ),
        {"rope_scaling": {"rope_type": "yarn", **_YARN}},
    ),
    "rope_llama3": Variant(
        TinyModel(**_SMALL, head_dim=16, rope_factors=llama3_factors(16, 10000.0, _LLAMA3)),
        {"rope_scaling": {"rope_type": "llama3", **_LLAMA3}},
    ),
}


def token_ids(vocab_size: int) -> list[int]:
    """`NUM_TOKENS` tokens, the same for every variant up to the size of its vocabulary."""
    fractions = np.random.default_rng(5).random(NUM_TOKENS)
    return [int(token) for token in fractions * vocab_size]
