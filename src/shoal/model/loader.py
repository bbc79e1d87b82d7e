"""Opens a model file: its configuration, its program and what ends its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from shoal.model.architectures import find_architecture
from shoal.model.architectures.interface import Architecture, ModelConfig, Tensors
from shoal.model.gguf import GGUFFile, MetadataValue
from shoal.model.metadata import Metadata
from shoal.model.program import Program

_CONTROL_TOKEN: Final = 3  # in tokenizer.ggml.token_type
_END_TOKEN_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")

# Tokens that end an answer whether or not the metadata say so: many files name one of two.
_END_TOKEN_TEXTS: Final = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)


@dataclass(frozen=True, slots=True, eq=False)
class ModelFile:
    """A model file whose metadata and weights have been checked; see `open_model`.

    `num_tokens` counts the tokens of the tokenizer. `config.vocab_size` may be larger: rows
    beyond have no text and must never be sampled. `eos_token_ids` are sorted; each ends an answer.
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    config: ModelConfig
    num_tokens: int
    eos_token_ids: tuple[int, ...]
    _architecture: Architecture = field(repr=False)
    _weights: Tensors = field(repr=False)

    def record_program(self, max_model_len: int) -> Program:
        """The model's program for sequences of up to `max_model_len` tokens.

        The weights are views of the file's memory map, which lives as long as they do.

        Raises:
            ValueError: `max_model_len` is below 1 or above the model's context.
        """
        if not 1 <= max_model_len <= self.config.context_length:
            raise ValueError(
                f"max_model_len {max_model_len} is not between 1 and the model's context of "
                f"{self.config.context_length} tokens"
            )
        return self._architecture.record_program(self.config, self._weights, max_model_len)


def open_model(path: str | Path) -> ModelFile:
    """Open the GGUF file at `path` and check all that serving it needs.

    Raises:
        ModelFileError: the file can't be read, is damaged, or holds something unsupported.
    """
    file = GGUFFile.open(path)
    metadata = Metadata(file.path, file.metadata)
    architecture = find_architecture(metadata)
    config = architecture.read_config(metadata, file.tensors)
    weights = architecture.select_weights(metadata, config, file.tensors)
    tokens = _tokens(metadata)
    num_tokens = len(tokens) or config.vocab_size
    if num_tokens > config.vocab_size:
        raise metadata.fail(
            f"the tokenizer has {num_tokens} tokens, but the embedding only "
            f"{config.vocab_size} rows"
        )
    return ModelFile(
        path=file.path,
        metadata=file.metadata,
        config=config,
        num_tokens=num_tokens,
        eos_token_ids=_eos_token_ids(metadata, tokens, num_tokens),
        _architecture=architecture,
        _weights=weights,
    )


def _tokens(metadata: Metadata) -> list[str]:
    key = "tokenizer.ggml.tokens"
    tokens = metadata.values.get(key, [])
    if not isinstance(tokens, list):
        raise metadata.fail(f"{key} must be an array of strings")
    strings = [token for token in tokens if isinstance(token, str)]
    if len(strings) != len(tokens):
        raise metadata.fail(f"{key} must be an array of strings")
    return strings


def _eos_token_ids(metadata: Metadata, tokens: list[str], num_tokens: int) -> tuple[int, ...]:
    ids = {
        metadata.integer(key, minimum=0, maximum=num_tokens - 1)
        for key in (f"tokenizer.ggml.{name}" for name in _END_TOKEN_KEYS)
        if key in metadata.values
    }
    types = metadata.values.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list):
        raise metadata.fail("tokenizer.ggml.token_type must be an array")
    ids.update(
        token_id
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
        if token_type == _CONTROL_TOKEN and token in _END_TOKEN_TEXTS
    )
    return tuple(sorted(ids))
