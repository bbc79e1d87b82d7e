"""Llama models open, and compute what HF transformers computes."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gguf_files import SPECIAL_TOKENS, TinyModel, tokenizer_metadata, write_tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle.llama_variants import CONTEXT_LENGTH, POSITIONS, VARIANTS, token_ids

from shoal.config import BLOCK_SIZE
from shoal.executor.reference import ReferenceExecutor
from shoal.model.errors import ModelFileError
from shoal.model.gguf import GGUFFile
from shoal.model.loader import ModelFile, open_model
from shoal.model.program import Linear, Logits, Rope
from shoal.model.quantization import dequantize
from shoal.model.weights import WeightType
from shoal.request import Request, SamplingParams
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden" / "llama.npz"

Write = Callable[[TinyModel], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    return lambda model: write_tiny_model(tmp_path / "tiny.gguf", model)


def all_logits(model: ModelFile, ids: list[int]) -> npt.NDArray[np.float64]:
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    program = model.record_program(num_blocks * BLOCK_SIZE)
    executor = ReferenceExecutor(program, num_blocks, np.float64)
    request = Request("a", ids, SamplingParams(), max_tokens=1, seed=0)
    scheduled = ScheduledRequest(request, ids, 0, list(range(num_blocks)), sample=True)
    logits: npt.NDArray[np.float64] = executor.logits(ScheduledStep(0, [scheduled]), all_rows=True)[
        "a"
    ]
    return logits


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_hf_transformers(name: str, write: Write) -> None:
    path = write(VARIANTS[name].model)
    with np.load(GOLDEN) as golden:
        expected, checksum = golden[name], golden[f"{name}.crc"]
    assert weights_checksum(path) == checksum, "the weights changed: run make_llama.py again"
    model = open_model(path)
    assert model.config.context_length == CONTEXT_LENGTH
    logits = all_logits(model, token_ids(model.config.vocab_size))[list(POSITIONS)]
    # HF computes the angles of far positions in float32, which alone differs by up to 3e-5.
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def weights_checksum(path: Path) -> int:
    tensors = GGUFFile.open(path).tensors
    checksum = 0
    for name in sorted(tensors):
        checksum = zlib.crc32(dequantize(tensors[name]).tobytes(), checksum)
    return checksum


def test_rope_factors_change_the_far_positions(write: Write) -> None:
    plain = open_model(write(TinyModel(head_dim=16)))
    ids = token_ids(plain.config.vocab_size)[:200]
    without = all_logits(plain, ids)
    scaled = TinyModel(head_dim=16, rope_factors=[1.0] * 4 + [8.0] * 4)
    with_factors = all_logits(open_model(write(scaled)), ids)
    differences = np.abs(without - with_factors).max(axis=1)
    assert differences[0] < 1e-9  # position 0 isn't rotated
    assert differences[150] > 0.1


def test_tied_and_untied_output_are_told_apart(write: Write) -> None:
    tied = open_model(write(TinyModel(tied=True))).record_program(8)
    untied = open_model(write(TinyModel(tied=False))).record_program(8)
    assert isinstance(tied.ops[-1], Logits)
    assert isinstance(untied.ops[-1], Logits)
    assert tied.ops[-1].weight == "token_embd.weight"
    assert untied.ops[-1].weight == "output.weight"


def test_q_k_v_and_gate_up_are_one_linear_each(write: Write) -> None:
    program = open_model(write(TinyModel(num_layers=1, biases=True))).record_program(8)
    qkv, _, gate_up, _ = [op for op in program.ops if isinstance(op, Linear)]
    assert qkv.weights == tuple(f"blk.0.attn_{part}.weight" for part in "qkv")
    assert qkv.biases == tuple(f"blk.0.attn_{part}.bias" for part in "qkv")
    assert gate_up.weights == ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")
    assert all(op.interleaved for op in program.ops if isinstance(op, Rope))


def test_every_view_lies_in_its_buffer_and_every_weight_is_there(write: Write) -> None:
    program = open_model(write(TinyModel(head_dim=24, tied=False))).record_program(8)
    for op in program.ops:
        for value in (getattr(op, name) for name in op.__dataclass_fields__):
            if hasattr(value, "buffer"):
                assert value.start + value.width <= program.buffers[value.buffer]
        if hasattr(op, "weight"):
            assert op.weight in program.weights
    assert "rope_freqs.weight" not in program.weights


@pytest.mark.parametrize("weight_type", list(WeightType))
def test_every_weight_type_opens(write: Write, weight_type: WeightType) -> None:
    model = TinyModel(weight_type=weight_type, hidden_size=256, intermediate_size=256)
    program = open_model(write(model)).record_program(8)
    assert program.weights["blk.0.attn_q.weight"].type is weight_type


def test_the_real_model_opens(model_path: Path) -> None:
    model = open_model(model_path)
    config = model.config
    assert (config.num_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert (config.num_heads, config.num_kv_heads) == (9, 3)
    assert (config.vocab_size, model.num_tokens, config.context_length) == (49152, 49152, 8192)
    assert model.eos_token_ids == (0, 2)  # <|endoftext|> and <|im_end|>
    program = model.record_program(8192)
    assert program.rope_cos.shape == program.rope_sin.shape == (8192, 32)


def test_the_vocabulary_may_be_larger_than_the_tokenizer(write: Write) -> None:
    model = open_model(write(TinyModel(vocab_padding=7)))
    assert model.config.vocab_size == model.num_tokens + 7


def test_a_tokenizer_larger_than_the_embedding_is_refused(write: Write) -> None:
    tokens = tokenizer_metadata("bpe")["tokenizer.ggml.tokens"]
    more = {"tokenizer.ggml.tokens": [*tokens, "one", "more"]}
    refused(write(TinyModel(metadata=more)), f"{len(tokens) + 2} tokens, but the embedding only")


def test_all_that_ends_an_answer_is_joined(write: Write) -> None:
    tokens = list(tokenizer_metadata("bpe")["tokenizer.ggml.tokens"])
    types = list(tokenizer_metadata("bpe")["tokenizer.ggml.token_type"])
    tokens[100], types[100] = "<end_of_turn>", 3
    tokens[101], types[101] = "<|eot_id|>", 1  # ordinary text that looks like one
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.eot_token_id": 8,
        "tokenizer.ggml.eom_token_id": 9,
    }
    end_of_text, im_end = SPECIAL_TOKENS.index("<|endoftext|>"), SPECIAL_TOKENS.index("<|im_end|>")
    model = open_model(write(TinyModel(metadata=metadata)))
    assert model.eos_token_ids == tuple(sorted({end_of_text, im_end, 7, 8, 9, 100}))


def test_tensors_nobody_needs_get_one_warning(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {"blk.0.mystery.weight": np.zeros((2, 2), np.float32)}
    with caplog.at_level(logging.WARNING):
        open_model(write(TinyModel(empty_tensor=True, extra_tensors=extra)))
    (record,) = caplog.records
    assert "2 tensors are not used: unused.empty, blk.0.mystery.weight" in record.getMessage()


def test_all_missing_tensors_are_named_in_one_error(write: Write) -> None:
    missing = ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_norm.weight")
    path = write(TinyModel(without_tensors=frozenset(missing)))
    refused(path, f"3 tensors are missing: {missing[0]}, {missing[1]}, {missing[2]}")


def test_a_wrong_shape_names_both(write: Write) -> None:
    name = "blk.1.ffn_up.weight"
    path = write(
        TinyModel(
            without_tensors=frozenset({name}),
            extra_tensors={name: np.zeros((5, 64), np.float32)},
        )
    )
    refused(path, f"{name} has shape (5, 64), the model needs (96, 64)")


def test_a_weight_of_no_elements_is_a_wrong_shape(write: Write) -> None:
    for name, message in (
        ("blk.0.attn_norm.weight", "has shape (0,), the model needs (64,)"),
        ("token_embd.weight", "has shape (0,), not (tokens, hidden size)"),
    ):
        empty = {name: np.empty(0, np.float32)}
        model = TinyModel(without_tensors=frozenset({name}), extra_tensors=empty)
        refused(write(model), f"{name} {message}")


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"llama.block_count": 0}, "llama.block_count must be between 1 and"),
        ({"llama.block_count": 2**31 - 1}, "llama.block_count must be between 1 and 20"),
        ({"llama.block_count": "two"}, "llama.block_count must be an integer, got 'two'"),
        ({"llama.block_count": 3}, "9 tensors are missing: blk.2.attn_norm.weight"),
        ({"llama.context_length": 2**31}, "llama.context_length must be between 1 and 16777216"),
        ({"llama.embedding_length": True}, "must be an integer, got True"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads can't share 3 KV heads evenly"),
        ({"llama.attention.head_count_kv": [2, 1]}, "differs between layers"),
        ({"llama.attention.head_count": 5}, "5 attention heads"),
        ({"llama.attention.value_length": 8}, "keys of 16 and values of 8 dimensions"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "must be finite and above 0, got 0.0"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be finite"),
        ({"llama.rope.dimension_count": 7}, "llama.rope.dimension_count must be even, got 7"),
        ({"llama.rope.dimension_count": 18}, "must be between 1 and 16, got 18"),
        ({"llama.rope.freq_base": 1.0}, "llama.rope.freq_base must be above 1"),
        (
            {"llama.rope.scaling.type": "longrope"},
            "is 'longrope'; supported are none, linear, yarn",
        ),
        ({"llama.expert_count": 8}, "mixture-of-experts models are not supported"),
        ({"tokenizer.ggml.eos_token_id": 100000}, "tokenizer.ggml.eos_token_id must be between 0"),
        ({"tokenizer.ggml.tokens": "a"}, "tokenizer.ggml.tokens must be an array of strings"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens must be an array of strings"),
    ],
)
def test_bad_metadata_are_named(write: Write, metadata: dict[str, Any], said: str) -> None:
    refused(write(TinyModel(metadata=metadata)), said)


def test_an_unknown_architecture_is_refused_by_name(write: Write) -> None:
    refused(write(TinyModel(architecture="mamba")), "'mamba' is not supported; known are llama")


def test_values_stated_once_for_each_layer_are_read(write: Write) -> None:
    metadata = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [96, 96]}
    config = open_model(write(TinyModel(metadata=metadata))).config
    assert (config.num_kv_heads, config.intermediate_size) == (2, 96)


@pytest.mark.parametrize("max_model_len", [0, 257])
def test_lengths_outside_the_context_are_refused(write: Write, max_model_len: int) -> None:
    model = open_model(write(TinyModel(context_length=256)))
    with pytest.raises(ValueError, match=f"{max_model_len} is not between 1 and .* 256"):
        model.record_program(max_model_len)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("inf"), float("nan")])
def test_rope_factors_that_are_no_divisors_are_refused(write: Write, factor: float) -> None:
    model = open_model(write(TinyModel(rope_factors=[1.0] * 7 + [factor])))
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight must be finite and above 0"):
        model.record_program(8)


@settings(max_examples=200, deadline=None)
@given(
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_flipped_bytes_before_the_data_give_success_or_a_model_file_error(
    fuzzed: tuple[Path, bytes, list[int]], flips: list[tuple[float, int]]
) -> None:
    path, content, positions = fuzzed
    flipped = bytearray(content)
    for fraction, value in flips:
        flipped[positions[int(fraction * len(positions))]] = value
    path.write_bytes(flipped)
    try:
        model = open_model(path)
        model.record_program(min(8, model.config.context_length))
    except ModelFileError:
        pass


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, list[int]]:
    """A file, its bytes, and the positions before its data but for those of the vocabulary."""
    scaling = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    model = TinyModel(rope_factors=[1.0] * 8, num_layers=1, metadata=scaling)
    path = write_tiny_model(tmp_path_factory.mktemp("fuzz") / "fuzzed.gguf", model)
    content = path.read_bytes()
    tokens, after = content.index(b"tokenizer.ggml.tokens"), content.index(b"tokenizer.ggml.bos")
    last_name = content.index(b"rope_freqs.weight")
    return path, content, [*range(tokens + 40), *range(after - 16, last_name + 60)]


def refused(path: Path, said: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(said)) as caught:
        open_model(path)
    assert str(path) in str(caught.value)
