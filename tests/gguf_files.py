"""Writes tiny GGUF models with random weights and a real tokenizer, for the tests of all parts.

path = write_tiny_model(tmp_path / "tiny.gguf", TinyModel(num_layers=1, tied=False))
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from shoal.model.quantization import FORMATS
from shoal.model.weights import WeightType

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6  # tokenizer.ggml.token_type

_TRAINING_TEXT = (
    "The shoal turned as one: a thousand small fish, each following its neighbours, and no fish "
    "leading. What is the capital of France? The capital of France is Paris, and the river that "
    "runs through it is the Seine. def add(a, b):\n    return a + b\n\nfor i in range(10):\n"
    "    print(i)\nOnce upon a time there was a small boat that could not sail. One two three "
    "four five six seven eight nine ten. Äpfel, naïve, 東京, 한국어, العربية.\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """What to write. The defaults give a two-layer Llama of about 100,000 weights."""

    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int | None = None  # written to the file if set; else hidden_size / num_heads
    context_length: int = 256
    weight_type: WeightType = WeightType.F32  # of the matrices; vectors are F32
    tied: bool = True
    biases: bool = False
    rope_base: float = 10000.0
    rope_factors: Sequence[float] | None = None  # rope_freqs.weight
    tokenizer: Literal["bpe", "spm"] = "bpe"
    vocab_padding: int = 0  # embedding rows beyond the tokenizer
    chat_template: str | None = CHAT_TEMPLATE
    alignment: int = 32
    trailing_padding: int = 0  # zero bytes after the last tensor
    empty_tensor: bool = False  # adds a tensor of no elements
    architecture: str = "llama"
    metadata: Mapping[str, Any] = field(default_factory=dict)  # added, or replacing what's written
    without_tensors: frozenset[str] = frozenset()
    extra_tensors: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    seed: int = 0


def write_tiny_model(path: Path, model: TinyModel | None = None) -> Path:
    """Write `model` to `path` and return the path. The same model gives the same bytes."""
    model = model or TinyModel()
    tokenizer = tokenizer_metadata(model.tokenizer)
    vocab_size = len(tokenizer["tokenizer.ggml.tokens"]) + model.vocab_padding
    writer = gguf.GGUFWriter(path, model.architecture)
    metadata = _model_metadata(model, vocab_size) | tokenizer | dict(model.metadata)
    if model.chat_template is not None:
        metadata.setdefault("tokenizer.chat_template", model.chat_template)
    if model.alignment != gguf.GGUF_DEFAULT_ALIGNMENT:
        writer.add_custom_alignment(model.alignment)
    for key, value in metadata.items():
        _add_metadata(writer, key, value)
    for name, values in _weights(model, vocab_size).items():
        if name not in model.without_tensors:
            _add_tensor(writer, name, values, model.weight_type)
    for name, values in model.extra_tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(model.trailing_padding))
    return path


def _model_metadata(model: TinyModel, vocab_size: int) -> dict[str, Any]:
    prefix = model.architecture
    metadata: dict[str, Any] = {
        "general.name": "tiny",
        f"{prefix}.context_length": model.context_length,
        f"{prefix}.embedding_length": model.hidden_size,
        f"{prefix}.block_count": model.num_layers,
        f"{prefix}.feed_forward_length": model.intermediate_size,
        f"{prefix}.attention.head_count": model.num_heads,
        f"{prefix}.attention.head_count_kv": model.num_kv_heads,
        f"{prefix}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{prefix}.rope.freq_base": model.rope_base,
        f"{prefix}.vocab_size": vocab_size,
    }
    if model.head_dim is not None:
        metadata[f"{prefix}.attention.key_length"] = model.head_dim
        metadata[f"{prefix}.attention.value_length"] = model.head_dim
        metadata[f"{prefix}.rope.dimension_count"] = model.head_dim
    return metadata


def _add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int() if value < 0:
            writer.add_int32(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _weights(model: TinyModel, vocab_size: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(model.seed)
    hidden, inner = model.hidden_size, model.intermediate_size
    head_dim = model.head_dim or hidden // model.num_heads
    q_width, kv_width = model.num_heads * head_dim, model.num_kv_heads * head_dim

    def matrix(outputs: int, inputs: int, scale: float = 1.0) -> npt.NDArray[np.float32]:
        values = rng.standard_normal((outputs, inputs)) * scale / np.sqrt(inputs)
        return values.astype(np.float32)

    def vector(size: int, mean: float) -> npt.NDArray[np.float32]:
        return (mean + 0.1 * rng.standard_normal(size)).astype(np.float32)

    # Layers that outweigh the embedding keep a tied model from repeating its last token.
    weights = {"token_embd.weight": matrix(vocab_size, hidden, scale=4.0)}
    for layer in range(model.num_layers):
        linears = {
            "attn_q": matrix(q_width, hidden, scale=2.0),
            "attn_k": matrix(kv_width, hidden, scale=2.0),
            "attn_v": matrix(kv_width, hidden, scale=2.0),
            "attn_output": matrix(hidden, q_width, scale=2.0),
            "ffn_gate": matrix(inner, hidden, scale=2.0),
            "ffn_up": matrix(inner, hidden, scale=2.0),
            "ffn_down": matrix(hidden, inner, scale=2.0),
        }
        for part in ("attn_norm", "ffn_norm"):
            weights[f"blk.{layer}.{part}.weight"] = vector(hidden, mean=1.0)
        for part, values in linears.items():
            weights[f"blk.{layer}.{part}.weight"] = values
            if model.biases:
                weights[f"blk.{layer}.{part}.bias"] = vector(len(values), mean=0.0)
    weights["output_norm.weight"] = vector(hidden, mean=1.0)
    if not model.tied:
        weights["output.weight"] = matrix(vocab_size, hidden, scale=4.0)
    if model.rope_factors is not None:
        weights["rope_freqs.weight"] = np.array(model.rope_factors, np.float32)
    if model.empty_tensor:
        weights["unused.empty"] = np.empty(0, np.float32)
    return weights


def _add_tensor(
    writer: gguf.GGUFWriter,
    name: str,
    values: npt.NDArray[np.float32],
    weight_type: WeightType,
) -> None:
    if values.ndim < 2 or weight_type is WeightType.F32:
        writer.add_tensor(name, values)
        return
    ggml_type = gguf.GGMLQuantizationType[weight_type.name]
    writer.add_tensor(name, quantize(values, weight_type), raw_dtype=ggml_type)


def quantize(
    values: npt.NDArray[np.float32], weight_type: WeightType
) -> npt.NDArray[np.uint8] | npt.NDArray[np.float16]:
    """`values` in `weight_type`, as bytes.

    The `gguf` package can't quantise to the K-quants: for those the result is random blocks whose
    values have about the spread of `values`.
    """
    if weight_type in (WeightType.Q4_K, WeightType.Q5_K, WeightType.Q6_K):
        return _random_k_blocks(values, weight_type)
    if weight_type is WeightType.F16:
        return values.astype(np.float16)
    quantized: npt.NDArray[np.uint8] = gguf.quantize(
        values, gguf.GGMLQuantizationType[weight_type.name]
    )
    return quantized


def _random_k_blocks(
    values: npt.NDArray[np.float32], weight_type: WeightType
) -> npt.NDArray[np.uint8]:
    block_format = FORMATS[weight_type]
    rng = np.random.default_rng(zlib.crc32(values.tobytes()))
    shape = (*values.shape[:-1], values.shape[-1] // block_format.elements)
    blocks = rng.integers(0, 256, (*shape, block_format.num_bytes), dtype=np.uint8)
    # Uniform quants times uniform 6-bit (Q6_K: signed 8-bit) scales: these factors centre the
    # values and make their standard deviation that of `values`.
    spread, offset = {
        WeightType.Q4_K: (230.0, 7.5),
        WeightType.Q5_K: (470.0, 15.5),
        WeightType.Q6_K: (1350.0, 0.0),
    }[weight_type]
    scale = np.float16(values.std() / spread)
    factors = [scale] if weight_type is WeightType.Q6_K else [scale, np.float16(offset * scale)]
    encoded = np.array(factors, np.float16).view(np.uint8)
    if weight_type is WeightType.Q6_K:
        blocks[..., -2:] = encoded
    else:
        blocks[..., :4] = encoded
    return blocks.reshape(*values.shape[:-1], -1)


@functools.cache
def tokenizer_metadata(kind: Literal["bpe", "spm"]) -> dict[str, Any]:
    """The tokenizer.ggml.* metadata of a real tokenizer, trained on a few sentences.

    "bpe" works on bytes (as GPT-2's) and starts with `SPECIAL_TOKENS`; "spm" is of SentencePiece's
    kind, with byte fallback and those tokens at the end.
    """
    return _bpe_metadata() if kind == "bpe" else _spm_metadata()


def _train(
    pre_tokenizer: pre_tokenizers.PreTokenizer, alphabet: list[str]
) -> tuple[list[str], list[str]]:
    """Tokens in the order of their ids, and merges as pairs parted by a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=10_000, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TRAINING_TEXT], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def _bpe_metadata() -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = _train(pre_tokenizers.ByteLevel(add_prefix_space=False), alphabet)
    tokens = [*SPECIAL_TOKENS, *tokens]
    types = [CONTROL if token in SPECIAL_TOKENS else NORMAL for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.add_bos_token": False,
    }


def _spm_metadata() -> dict[str, Any]:
    pieces, merges = _train(pre_tokenizers.Metaspace(), alphabet=[])
    merged = {merge.replace(" ", "") for merge in merges}
    # SentencePiece ranks by score: merges in their order, single characters below them.
    ordered = [piece for piece in pieces if piece in merged]
    ordered += [piece for piece in pieces if piece not in merged]
    entries: list[tuple[str, float, int]] = [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
        *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
        *((piece, -float(rank), NORMAL) for rank, piece in enumerate(ordered)),
        *((token, 0.0, CONTROL) for token in SPECIAL_TOKENS),
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [token for token, _, _ in entries],
        "tokenizer.ggml.scores": [score for _, score, _ in entries],
        "tokenizer.ggml.token_type": [kind for _, _, kind in entries],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }
