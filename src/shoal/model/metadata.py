"""Typed access to the metadata of a model file: every value is checked where it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.model.errors import ModelFileError
from shoal.model.gguf import MetadataValue


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of the file at `path`.

    The methods raise `ModelFileError`, naming file, key and value, when a value is missing (and
    no default is given), of another type or out of range.
    """

    path: Path
    values: Mapping[str, MetadataValue]

    def fail(self, message: str) -> ModelFileError:
        """An error about this file, to be raised."""
        return ModelFileError(f"{self.path}: {message}")

    def string(self, key: str, default: str | None = None) -> str:
        """The string at `key`."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        """The integer at `key`, between `minimum` and `maximum`.

        A list counts as its value if all its entries are equal: some files state a value that
        every layer shares once for each layer.
        """
        value = self._get(key, default)
        if isinstance(value, list) and value:
            if any(entry != value[0] for entry in value):
                raise self.fail(f"{key} differs between layers, which is not supported: {value}")
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "an integer", value)
        if not minimum <= value <= maximum:
            raise self.fail(f"{key} must be between {minimum} and {maximum}, got {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The finite number above 0 at `key`."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        if not (math.isfinite(value) and value > 0):
            raise self.fail(f"{key} must be finite and above 0, got {value}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """The boolean at `key`."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "a boolean", value)
        return value

    def _get(self, key: str, default: MetadataValue | None) -> MetadataValue:
        value = self.values.get(key, default)
        if value is None:
            raise self.fail(f"the metadata lack {key}")
        return value

    def _wrong(self, key: str, expected: str, value: MetadataValue) -> ModelFileError:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return self.fail(f"{key} must be {expected}, got {shown}")
