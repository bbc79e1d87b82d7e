"""The model architectures that Shoal knows, by the name that a model file gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shoal.model.architectures import llama
from shoal.model.architectures.interface import Architecture
from shoal.model.metadata import Metadata

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": llama.ARCHITECTURE,
}


def find_architecture(metadata: Metadata) -> Architecture:
    """The architecture that `general.architecture` asks for.

    Raises:
        ModelFileError: the key is missing or names an unknown architecture.
    """
    name = metadata.string("general.architecture")
    if name not in ARCHITECTURES:
        raise metadata.fail(
            f"the architecture {name!r} is not supported; known are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]
