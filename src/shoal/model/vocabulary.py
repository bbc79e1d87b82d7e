"""Reads and checks the tokenizer's part of a GGUF file's metadata: the keys `tokenizer.ggml.*`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from shoal.model.errors import ModelFileError

_PREFIX: Final = "tokenizer.ggml."

_Value = TypeVar("_Value", bool, int, str)
_Element = TypeVar("_Element")


class TokenType(enum.IntEnum):
    """What a token is for, as GGML numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class TokenizerModel(enum.StrEnum):
    """The kinds of tokenizer that Shoal reads, as `tokenizer.ggml.model` names them."""

    BYTE_LEVEL = "gpt2"  # byte-level BPE
    SENTENCEPIECE = "llama"  # SentencePiece BPE with byte fallback


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model, and what the file says about them.

    A token's id is its index in `tokens`. `types` has a type for each token, or is empty where the
    file states none; `scores` likewise. `None` stands for what the file doesn't say.
    """

    model: TokenizerModel
    pre: str | None
    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]
    merges: Sequence[str] | None
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None
    add_bos_token: bool | None
    add_eos_token: bool
    add_space_prefix: bool

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Vocabulary:
        """Reads the metadata; raises `ModelFileError` naming the key that is missing or wrong."""
        tokens = _array(metadata, "tokens", (str,), "strings")
        if not tokens:
            raise ModelFileError(f"The model file has no tokens ({_PREFIX}tokens).")
        types = _parallel(_array(metadata, "token_type", (int,), "integers"), tokens, "token_type")
        scores = _parallel(_array(metadata, "scores", (float, int), "numbers"), tokens, "scores")
        return cls(
            model=_model(metadata),
            pre=_optional(metadata, "pre", str),
            tokens=tokens,
            types=types,
            scores=scores,
            merges=_array(metadata, "merges", (str,), "strings") or None,
            bos_token_id=_token_id(metadata, "bos_token_id", tokens),
            eos_token_id=_token_id(metadata, "eos_token_id", tokens),
            unknown_token_id=_token_id(metadata, "unknown_token_id", tokens),
            padding_token_id=_token_id(metadata, "padding_token_id", tokens),
            add_bos_token=_optional(metadata, "add_bos_token", bool),
            add_eos_token=_optional(metadata, "add_eos_token", bool) or False,
            add_space_prefix=_optional(metadata, "add_space_prefix", bool) is not False,
        )

    def ids_of_type(self, token_type: TokenType) -> list[int]:
        """The ids of all tokens of this type, ascending."""
        return [token_id for token_id, kind in enumerate(self.types) if kind == token_type]

    def special_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that structure a text and are no part of it.

        They are the control tokens, the unknown token, and the beginning and end of sequence
        whatever their type. Without types, what the file names as unknown or padding as well: with
        types such a token may be an ordinary one, as padding is "!" in some files.
        """
        named = {self.bos_token_id, self.eos_token_id}
        if not self.types:
            named |= {self.unknown_token_id, self.padding_token_id}
        typed = self.ids_of_type(TokenType.CONTROL) + self.ids_of_type(TokenType.UNKNOWN)
        return frozenset(typed) | {token_id for token_id in named if token_id is not None}


def _model(metadata: Mapping[str, object]) -> TokenizerModel:
    name = _optional(metadata, "model", str)
    if name is None:
        raise ModelFileError(f"The model file has no tokenizer ({_PREFIX}model is missing).")
    try:
        return TokenizerModel(name)
    except ValueError:
        known = ", ".join(sorted(TokenizerModel))
        raise ModelFileError(
            f"The tokenizer {name!r} ({_PREFIX}model) is not supported; supported are {known}."
        ) from None


def _optional(metadata: Mapping[str, object], name: str, kind: type[_Value]) -> _Value | None:
    value = metadata.get(_PREFIX + name)
    if value is None:
        return None
    # bool is a subclass of int, and no token id.
    if type(value) is not kind:
        raise ModelFileError(f"{_PREFIX}{name} must be of type {kind.__name__}, got {value!r:.40}.")
    return value


def _array(
    metadata: Mapping[str, object], name: str, kinds: tuple[type[_Element], ...], described: str
) -> Sequence[_Element]:
    values = metadata.get(_PREFIX + name, [])
    if not isinstance(values, list) or not set(map(type, values)) <= set(kinds):
        raise ModelFileError(f"{_PREFIX}{name} must be an array of {described}.")
    return values


def _parallel(values: Sequence[_Element], tokens: Sequence[str], name: str) -> Sequence[_Element]:
    if values and len(values) != len(tokens):
        raise ModelFileError(
            f"{_PREFIX}{name} has {len(values)} entries for {len(tokens)} tokens; "
            "it must have one for each."
        )
    return values


def _token_id(metadata: Mapping[str, object], name: str, tokens: Sequence[str]) -> int | None:
    token_id = _optional(metadata, name, int)
    if token_id is not None and not 0 <= token_id < len(tokens):
        raise ModelFileError(f"{_PREFIX}{name} is {token_id}, but there are {len(tokens)} tokens.")
    return token_id
