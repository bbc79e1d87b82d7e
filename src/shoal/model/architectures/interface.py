"""What an architecture has to offer, and the configuration that all of them share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from shoal.model.metadata import Metadata
from shoal.model.program import Program
from shoal.model.rope import RopeConfig
from shoal.model.weights import WeightTensor

Tensors = Mapping[str, WeightTensor]

_MAX_NAMES_SHOWN = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The sizes of a decoder-only transformer.

    `num_heads * head_dim` may differ from `hidden_size`. `vocab_size` counts the rows of the
    embedding, which may be more than the tokenizer has tokens.
    """

    architecture: str
    vocab_size: int
    context_length: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_epsilon: float
    rope: RopeConfig


class Architecture(NamedTuple):
    """How to read and to compute the models of one architecture.

    `read_config` raises `ModelFileError` for values that are missing, out of range or not
    supported. `select_weights` returns the weights that the model uses, checked for presence and
    shape. `record_program` records the model for sequences of up to the given number of tokens.
    """

    read_config: Callable[[Metadata, Tensors], ModelConfig]
    select_weights: Callable[[Metadata, ModelConfig, Tensors], dict[str, WeightTensor]]
    record_program: Callable[[ModelConfig, Tensors, int], Program]


Shapes = Mapping[str, tuple[int, ...]]


def check_weights(
    metadata: Metadata, tensors: Tensors, required: Shapes, optional: Shapes
) -> dict[str, WeightTensor]:
    """The tensors that `required` and `optional` name; the others get one warning.

    Raises:
        ModelFileError: a required tensor is missing (all missing ones are named), or a tensor
            has another shape than the model's.
    """
    if missing := [name for name in required if name not in tensors]:
        raise metadata.fail(f"{len(missing)} tensors are missing: {_enumerate(missing)}")
    expected = {**required, **optional}
    if wrong := [
        f"{name} has shape {tensors[name].shape}, the model needs {shape}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]:
        raise metadata.fail(_enumerate(wrong, "; "))
    if extra := [name for name in tensors if name not in expected]:
        logger.warning(
            "%s: %d tensors are not used: %s", metadata.path, len(extra), _enumerate(extra)
        )
    return {name: tensors[name] for name in expected if name in tensors}


def _enumerate(items: Iterable[str], separator: str = ", ") -> str:
    items = list(items)
    shown = separator.join(items[:_MAX_NAMES_SHOWN])
    hidden = len(items) - _MAX_NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown
