"""What can go wrong with a model before it serves."""

from __future__ import annotations


class ModelError(Exception):
    """A model can't be used; the message is one sentence for the user."""


class ModelFileError(ModelError):
    """A model file is damaged, or holds something that Shoal doesn't support."""


class ModelNotFoundError(ModelError):
    """A model can't be found or fetched."""
