"""The size of a KV pool of 1 MiB for the tiny model, which depends on the instruction set."""

from __future__ import annotations

from gguf_files import TinyModel

from shoal._native import default_isa, kernels
from shoal.config import BLOCK_SIZE

SMALL_POOL_MIB = 1
_TINY = TinyModel()
NUM_POOL_BLOCKS = (SMALL_POOL_MIB << 20) // kernels.kv_block_bytes(
    default_isa(), _TINY.num_layers, _TINY.num_kv_heads, _TINY.hidden_size // _TINY.num_heads
)
NUM_POOL_TOKENS = NUM_POOL_BLOCKS * BLOCK_SIZE
