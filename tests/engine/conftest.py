from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import write_tiny_model

from shoal.model.loader import open_model
from shoal.model.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model file with random weights, a context of 256 tokens and a real tokenizer."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tokenizer(tiny_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_model(tiny_path).metadata)
