"""A model as a recorded program: a flat list of ops over named buffers of float32 rows.

An architecture records its program once from the configuration and the names of its weights; an
executor replays it for a ragged batch. A buffer holds one row for each token of the batch (or,
after `SelectRows`, one for each row that needs logits). The op set is closed and small.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from shoal.model.weights import WeightTensor


@dataclass(frozen=True, slots=True)
class View:
    """Columns `start` to `start + width` of every row of a buffer."""

    buffer: str
    start: int
    width: int


@dataclass(frozen=True, slots=True)
class Embed:
    """`out[row] = weight[token_id[row]]`."""

    out: View
    weight: str  # [vocab_size, out.width]


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """`out = x / sqrt(mean(x^2) + epsilon) * weight`, over each row (Zhang and Sennrich, 2019)."""

    x: View
    out: View
    weight: str  # [x.width]
    epsilon: float


@dataclass(frozen=True, slots=True)
class Linear:
    """`out = concat(weights) @ x + concat(biases)`; the weights stack along the output."""

    x: View
    out: View
    weights: tuple[str, ...]  # each [n_i, x.width], sum(n_i) = out.width
    biases: tuple[str | None, ...]  # each [n_i], aligned with weights


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotates each head of `x` in place by its position (Su et al., 2021).

    Pairs are (2i, 2i+1) when `interleaved`, else (i, i + rotary_dim/2). Dimensions past
    `rotary_dim` stay as they are. The angles come from the program's `rope_cos`/`rope_sin`.
    """

    x: View
    num_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Attention:
    """Writes k and v to the KV blocks of `layer`, then attends causally through the block table.

    Query head h reads KV head `h // (num_heads / num_kv_heads)`. `window` limits a query at
    position p to keys at positions above p - window. `soft_cap` c maps a score s to c*tanh(s/c).
    """

    q: View  # [num_heads * head_dim]
    k: View  # [num_kv_heads * head_dim]
    v: View  # [num_kv_heads * head_dim]
    out: View  # [num_heads * head_dim]
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """`out = silu(gate) * up`, silu(x) = x / (1 + exp(-x)) (SwiGLU: Shazeer, 2020)."""

    gate: View
    up: View
    out: View


@dataclass(frozen=True, slots=True)
class Add:
    """`x += y` (the residual stream)."""

    x: View
    y: View


@dataclass(frozen=True, slots=True)
class SelectRows:
    """`out[i] = x[logit_rows[i]]`: from here on only the rows that need logits are computed."""

    x: View
    out: View


@dataclass(frozen=True, slots=True)
class Logits:
    """`logits = weight @ x`, the last op; its result goes to sampling."""

    x: View
    weight: str  # [vocab_size, x.width]


Op = Embed | RmsNorm | Linear | Rope | Attention | GatedActivation | Add | SelectRows | Logits


@dataclass(frozen=True, slots=True)
class Program:
    """The ops of one model with all that they name.

    `rope_cos` and `rope_sin` are float32 [max_model_len, rotary_dim / 2], computed once in float64
    so that every executor and instruction set sees the same angles.
    """

    ops: tuple[Op, ...]
    buffers: dict[str, int]  # name: columns
    weights: dict[str, WeightTensor]
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rope_cos: npt.NDArray[np.float32] = field(repr=False)
    rope_sin: npt.NDArray[np.float32] = field(repr=False)
