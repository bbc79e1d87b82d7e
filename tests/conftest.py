"""Fixtures that all tests share."""

from pathlib import Path

import pytest

from shoal.model import registry


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The demo model's GGUF file; fetched on first use, about 90 MB."""
    return registry.resolve("smollm2-135m")
