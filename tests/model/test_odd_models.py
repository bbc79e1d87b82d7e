"""Model files that are whole but odd: empty weights, zero sizes, rows of padding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_files import TinyModel, write_tiny_model

from shoal import LLM, SamplingParams
from shoal.model.errors import ModelFileError
from shoal.model.loader import open_model


def test_a_weight_with_a_zero_dimension_is_a_clean_error(tmp_path: Path) -> None:
    name = "blk.0.ffn_up.weight"
    model = TinyModel(
        without_tensors=frozenset({name}),
        extra_tensors={name: np.zeros((0, 64), np.float32)},
    )
    path = write_tiny_model(tmp_path / "zero.gguf", model)
    with pytest.raises(ModelFileError, match=name):
        open_model(path).record_program(64)


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.head_count_kv",
        "llama.context_length",
    ],
)
def test_a_size_of_zero_is_a_clean_error(tmp_path: Path, key: str) -> None:
    path = write_tiny_model(tmp_path / "zero.gguf", TinyModel(metadata={key: 0}))
    with pytest.raises(ModelFileError):
        open_model(path).record_program(64)


def test_rows_beyond_the_tokenizer_are_never_sampled(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "padded.gguf", TinyModel(vocab_padding=300))
    num_tokens = open_model(path).num_tokens
    with LLM(str(path), kv_cache_memory_mib=8) as llm:
        params = SamplingParams(temperature=100.0, seed=1, max_tokens=200, ignore_eos=True)
        outputs = llm.generate([[1, 2, 3]] * 4, params)
    drawn = [token_id for output in outputs for token_id in output.token_ids]
    assert len(drawn) == 800
    assert max(drawn) < num_tokens
