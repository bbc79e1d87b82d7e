"""Whether a result can be written, asked before the minutes that it takes to measure it."""

from __future__ import annotations

import os
from pathlib import Path

from shoal.config import ConfigError


def require_writable(setting: str, path: Path) -> None:
    """Make sure that a file can be written, without leaving or changing one.

    A device or a pipe is taken as it is: opening it would already tell its reader something.

    Args:
        setting: the name of the setting that the path came from, for the message.
        path: the file, which may exist.

    Raises:
        ConfigError: it can't be created or changed; the message says why.
    """
    target = Path(os.path.realpath(path))
    try:
        if not target.exists():
            target.open("xb").close()
            target.unlink()
        elif target.is_file() or target.is_dir():
            target.open("ab").close()
    except OSError as error:
        raise ConfigError(f"{setting} {path} can't be written: {error.strerror}") from error
