from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from questions import QUESTIONS, Answer, Load, ask_one_by_one

from shoal import LLM


@pytest.fixture(scope="session")
def load(model_path: Path) -> Load:
    """Loads the real model with these settings."""

    def load(**settings: Any) -> LLM:
        return LLM(str(model_path), **{"kv_cache_memory_mib": 256, **settings})

    return load


@pytest.fixture(scope="session")
def alone(load: Load) -> list[Answer]:
    """The reference: what each question is answered with nobody beside and nothing cached."""
    with load(max_num_seqs=1, num_threads=1, enable_prefix_caching=False) as llm:
        return ask_one_by_one(llm, QUESTIONS)
