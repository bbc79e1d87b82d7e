"""The flags with which `shoal serve` gets an engine's settings."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields

from shoal.config import EngineConfig


def serve_flags(config: EngineConfig, always: Collection[str] = ()) -> list[str]:
    """The flags of the settings that aren't the default, and of those named in `always`.

    A setting that is not set has no flag. The model is left out: it is the argument of the command.
    """
    flags: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        is_wanted = field.name in always or value != field.default
        if field.name == "model" or value is None or not is_wanted:
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            flags += [text for item in value for text in (f"--{name}", str(item))]
        else:
            flags += [f"--{name}", str(value)]
    return flags
