"""Types of the native module; the C++ side is native/module.cpp."""

from array import array
from types import ModuleType

import numpy as np
import numpy.typing as npt

View = tuple[int, int, int]  # buffer, first column, columns
Floats = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Ids = array[int]  # of C int

# status (0 or an error), token_ids, logprobs, top_ids and top_logprobs [rows, largest num_top]
RowResults = tuple[Int32s, Int32s, Floats, Int32s, Floats]

kernels: ModuleType  # single kernels, for the tests

def default_isa() -> str: ...
def can_multiply_gated(storage_type: str, outputs: int, next_type: str, /) -> bool: ...

class SamplingSettings:
    def __init__(
        self,
        *,
        seed: int,
        sample_index: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        repetition_penalty: float,
        presence_penalty: float,
        frequency_penalty: float,
        min_tokens: int,
        end_token_ids: list[int],
        logit_bias: list[tuple[int, float]],
    ) -> None: ...

class Session:
    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        rope_cos: Floats,
        rope_sin: Floats,
        isa: str,
    ) -> None: ...
    @property
    def block_bytes(self) -> int: ...
    def add_buffer(self, columns: int, /) -> int: ...
    def add_linear(
        self,
        storage_type: str,
        data: npt.NDArray[np.uint8],
        outputs: int,
        inputs: int,
        gated: bool = False,
    ) -> int: ...
    def embed(self, out: View, linear: int, /) -> None: ...
    def rms_norm(self, x: View, out: View, weight: Floats, epsilon: float, /) -> None: ...
    def linear(self, x: View, out: View, linear: int, first_wide: int, /) -> None: ...
    def feed_forward(self, x: View, out: View, gate_up: int, down: int, wide: bool, /) -> None: ...
    def add_bias(self, x: View, bias: Floats, /) -> None: ...
    def rope(
        self, x: View, num_heads: int, head_dim: int, rotary_dim: int, interleaved: bool, /
    ) -> None: ...
    def attention(
        self,
        q: View,
        k: View,
        v: View,
        out: View,
        layer: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        soft_cap: float,
        /,
    ) -> None: ...
    def gated_activation(self, gate: View, up: View, out: View, /) -> None: ...
    def add(self, x: View, y: View, /) -> None: ...
    def select_rows(self, x: View, out: View, /) -> None: ...
    def logits(self, x: View, linear: int, /) -> None: ...
    def start(self, kv: npt.NDArray[np.uint8], num_valid_tokens: int, num_threads: int) -> None: ...
    def close(self) -> None: ...
    def set_slot(
        self, slot: int, settings: SamplingSettings, prompt: Ids, outputs: Ids, /
    ) -> None: ...
    def clear_slot(self, slot: int, /) -> None: ...
    def execute(
        self,
        token_ids: Ids,
        query_start_loc: Ids,
        num_computed_tokens: Ids,
        block_tables: Ids,
        block_table_start: Ids,
        rows: Ids,
        slots: Ids,
        targets: Ids,
        num_top: Ids,
    ) -> RowResults: ...
    def compute_logits(
        self,
        token_ids: Ids,
        query_start_loc: Ids,
        num_computed_tokens: Ids,
        block_tables: Ids,
        block_table_start: Ids,
        rows: Ids,
    ) -> Floats: ...
