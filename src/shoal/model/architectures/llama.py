"""Llama (Touvron et al., 2023) and what shares its shape: Mistral, SmolLM and others.

Pre-normalised blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward
layer. GGUF files of this architecture store the rows of the query and key projections so that the
dimensions of a rotated pair are neighbours.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.model.architectures.interface import (
    Architecture,
    ModelConfig,
    Tensors,
    check_weights,
)
from shoal.model.metadata import Metadata
from shoal.model.program import (
    Add,
    Attention,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    Op,
    Program,
    RmsNorm,
    Rope,
    SelectRows,
    View,
)
from shoal.model.rope import read_rope_config, rope_tables
from shoal.model.weights import WeightTensor

ShapeTable = dict[str, tuple[int, ...]]

NAME = "llama"
MAX_CONTEXT_LENGTH = 1 << 24  # bounds what a damaged file can make us allocate

_EMBEDDING = "token_embd.weight"
_OUTPUT_NORM = "output_norm.weight"
_OUTPUT = "output.weight"  # missing when it is tied to the embedding
_ROPE_FACTORS = "rope_freqs.weight"


def read_config(metadata: Metadata, tensors: Tensors) -> ModelConfig:
    """The sizes that the metadata state; the vocabulary's is that of the embedding."""
    if metadata.integer(f"{NAME}.expert_count", 0, minimum=0):
        raise metadata.fail("mixture-of-experts models are not supported")
    hidden_size = metadata.integer(f"{NAME}.embedding_length")
    num_heads = metadata.integer(f"{NAME}.attention.head_count")
    num_kv_heads = metadata.integer(f"{NAME}.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise metadata.fail(
            f"{num_heads} attention heads can't share {num_kv_heads} KV heads evenly"
        )
    head_dim = _head_dim(metadata, hidden_size, num_heads)
    context_length = metadata.integer(f"{NAME}.context_length", maximum=MAX_CONTEXT_LENGTH)
    return ModelConfig(
        architecture=NAME,
        vocab_size=_vocab_size(metadata, tensors),
        context_length=context_length,
        hidden_size=hidden_size,
        intermediate_size=metadata.integer(f"{NAME}.feed_forward_length"),
        # Each layer has tensors of its own, so their number bounds that of the layers.
        num_layers=metadata.integer(f"{NAME}.block_count", maximum=max(1, len(tensors))),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_epsilon=metadata.number(f"{NAME}.attention.layer_norm_rms_epsilon"),
        rope=read_rope_config(metadata, NAME, head_dim, context_length),
    )


def _head_dim(metadata: Metadata, hidden_size: int, num_heads: int) -> int:
    key = f"{NAME}.attention.key_length"
    if key not in metadata.values and hidden_size % num_heads:
        raise metadata.fail(
            f"{num_heads} attention heads don't divide the hidden size {hidden_size}, "
            f"and {key} is missing"
        )
    head_dim = metadata.integer(key, hidden_size // num_heads)
    value_length = metadata.integer(f"{NAME}.attention.value_length", head_dim)
    if value_length != head_dim:
        raise metadata.fail(
            f"keys of {head_dim} and values of {value_length} dimensions are not supported: "
            "they must be equal"
        )
    return head_dim


def _vocab_size(metadata: Metadata, tensors: Tensors) -> int:
    embedding = tensors.get(_EMBEDDING)
    if embedding is None:
        return 0  # `select_weights` names all that is missing
    if len(embedding.shape) != 2 or 0 in embedding.shape:
        raise metadata.fail(f"{_EMBEDDING} has shape {embedding.shape}, not (tokens, hidden size)")
    return embedding.shape[0]


def select_weights(
    metadata: Metadata, config: ModelConfig, tensors: Tensors
) -> dict[str, WeightTensor]:
    """The weights of the model, and `rope_freqs.weight` if there is one."""
    required, optional = _model_shapes(config)
    for layer in range(config.num_layers):
        weights, biases = _layer_shapes(config, layer)
        required |= weights
        optional |= biases
    return check_weights(metadata, tensors, required, optional)


def _model_shapes(config: ModelConfig) -> tuple[ShapeTable, ShapeTable]:
    table = (config.vocab_size, config.hidden_size)
    required: ShapeTable = {_EMBEDDING: table, _OUTPUT_NORM: (config.hidden_size,)}
    optional: ShapeTable = {_OUTPUT: table, _ROPE_FACTORS: (config.rope.rotary_dim // 2,)}
    return required, optional


def _layer_shapes(config: ModelConfig, layer: int) -> tuple[ShapeTable, ShapeTable]:
    """Shapes of the weights, and of the biases that some models add."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears: dict[str, tuple[int, int]] = {
        "attn_q": (q_width, hidden),
        "attn_k": (kv_width, hidden),
        "attn_v": (kv_width, hidden),
        "attn_output": (hidden, q_width),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    weights: ShapeTable = {
        _weight(layer, "attn_norm"): (hidden,),
        _weight(layer, "ffn_norm"): (hidden,),
    }
    weights |= {_weight(layer, part): shape for part, shape in linears.items()}
    biases: ShapeTable = {_bias(layer, part): shape[:1] for part, shape in linears.items()}
    return weights, biases


def _weight(layer: int, part: str) -> str:
    return f"blk.{layer}.{part}.weight"


def _bias(layer: int, part: str) -> str:
    return f"blk.{layer}.{part}.bias"


def record_program(config: ModelConfig, weights: Tensors, max_model_len: int) -> Program:
    """The program of the model for sequences of up to `max_model_len` tokens."""
    rope_cos, rope_sin = rope_tables(config.rope, max_model_len, weights.get(_ROPE_FACTORS))
    recorder = _Recorder(config, weights)
    return Program(
        ops=tuple(recorder.record()),
        buffers=recorder.buffers,
        weights={name: weight for name, weight in weights.items() if name != _ROPE_FACTORS},
        vocab_size=config.vocab_size,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_model_len=max_model_len,
        rope_cos=rope_cos,
        rope_sin=rope_sin,
    )


class _Recorder:
    """Appends the ops of a model one block after the other."""

    def __init__(self, config: ModelConfig, weights: Tensors) -> None:
        self._config = config
        self._weights = weights
        self._q_width = config.num_heads * config.head_dim
        self._kv_width = config.num_kv_heads * config.head_dim
        self.buffers = {
            "hidden": config.hidden_size,  # the residual stream
            "normed": config.hidden_size,
            "qkv": self._q_width + 2 * self._kv_width,
            "attended": self._q_width,
            "projected": config.hidden_size,
            "gate_up": 2 * config.intermediate_size,
            "activated": config.intermediate_size,
            "selected_hidden": config.hidden_size,
            "selected_attended": self._q_width,
        }
        self._ops: list[Op] = []

    def record(self) -> list[Op]:
        hidden, attended = self._view("hidden"), self._view("attended")
        self._ops.append(Embed(hidden, _EMBEDDING))
        last = self._config.num_layers - 1
        for layer in range(self._config.num_layers):
            self._attention(layer, hidden, attended)
            if layer == last:
                # Nothing after the last attention looks at another row: go on with those that
                # need logits.
                hidden = self._select(hidden, "selected_hidden")
                attended = self._select(attended, "selected_attended")
            self._add_linear(layer, attended, "attn_output", hidden)
            self._feed_forward(layer, hidden)
        normed = self._norm(hidden, _OUTPUT_NORM)
        self._ops.append(Logits(normed, _OUTPUT if _OUTPUT in self._weights else _EMBEDDING))
        return self._ops

    def _attention(self, layer: int, hidden: View, attended: View) -> None:
        config = self._config
        normed = self._norm(hidden, _weight(layer, "attn_norm"))
        self._linear(layer, normed, ("attn_q", "attn_k", "attn_v"), self._view("qkv"))
        q = View("qkv", 0, self._q_width)
        k = View("qkv", self._q_width, self._kv_width)
        v = View("qkv", self._q_width + self._kv_width, self._kv_width)
        rope = Rope(q, config.num_heads, config.head_dim, config.rope.rotary_dim, interleaved=True)
        self._ops.append(rope)
        self._ops.append(replace(rope, x=k, num_heads=config.num_kv_heads))
        self._ops.append(
            Attention(
                q=q,
                k=k,
                v=v,
                out=attended,
                layer=layer,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                scale=config.head_dim**-0.5,
            )
        )

    def _feed_forward(self, layer: int, hidden: View) -> None:
        inner = self._config.intermediate_size
        normed = self._norm(hidden, _weight(layer, "ffn_norm"))
        self._linear(layer, normed, ("ffn_gate", "ffn_up"), self._view("gate_up"))
        gate, up = View("gate_up", 0, inner), View("gate_up", inner, inner)
        activated = self._view("activated")
        self._ops.append(GatedActivation(gate, up, activated))
        self._add_linear(layer, activated, "ffn_down", hidden)

    def _norm(self, x: View, weight: str) -> View:
        normed = self._view("normed")
        self._ops.append(RmsNorm(x, normed, weight, self._config.rms_norm_epsilon))
        return normed

    def _linear(self, layer: int, x: View, parts: tuple[str, ...], out: View) -> None:
        biases = (_bias(layer, part) for part in parts)
        self._ops.append(
            Linear(
                x,
                out,
                weights=tuple(_weight(layer, part) for part in parts),
                biases=tuple(bias if bias in self._weights else None for bias in biases),
            )
        )

    def _add_linear(self, layer: int, x: View, part: str, hidden: View) -> None:
        projected = self._view("projected")
        self._linear(layer, x, (part,), projected)
        self._ops.append(Add(hidden, projected))

    def _select(self, x: View, name: str) -> View:
        selected = self._view(name)
        self._ops.append(SelectRows(x, selected))
        return selected

    def _view(self, buffer: str) -> View:
        return View(buffer, 0, self.buffers[buffer])


ARCHITECTURE = Architecture(read_config, select_weights, record_program)
