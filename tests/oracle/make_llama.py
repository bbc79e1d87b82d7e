"""Makes golden/llama.npz, the logits of tiny Llama models by HF transformers, or checks them.

    python tests/oracle/make_llama.py [--check]

The models are those of `llama_variants.py`. Their weights go from the GGUF file through the `gguf`
package into `LlamaForCausalLM` in float64, none of Shoal's code between. Needs torch, transformers
and gguf.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import zlib
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from gguf_files import TinyModel, write_tiny_model
from llama_variants import POSITIONS, VARIANTS, Variant, token_ids

GOLDEN = Path(__file__).parent / "golden" / "llama.npz"
TOLERANCE = 1e-6  # relative to the largest logit, between two machines' float64

Weights = dict[str, npt.NDArray[np.float32]]

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
MODEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def read_weights(path: Path) -> Weights:
    """All tensors of a GGUF file, dequantised by the `gguf` package."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def to_hf(weights: Weights, num_heads: int, num_kv_heads: int) -> Weights:
    """The same under HF's names, with the rows of q and k in HF's order.

    GGUF files of this architecture hold the dimensions (i, i + head_dim / 2) that HF rotates
    together side by side.
    """
    renamed: Weights = {}
    for name, values in weights.items():
        if name in MODEL_NAMES:
            renamed[MODEL_NAMES[name]] = values
        elif name.startswith("blk."):
            _, layer, part, kind = name.split(".")
            if part in ("attn_q", "attn_k"):
                heads = num_heads if part == "attn_q" else num_kv_heads
                pairs = values.reshape(heads, len(values) // heads // 2, 2, -1)
                values = pairs.swapaxes(1, 2).reshape(values.shape)  # noqa: PLW2901 - the new view
            renamed[f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"] = values
    return renamed


def hf_model(model: TinyModel, variant: Variant, weights: Weights) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(weights["token_embd.weight"]),
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_dim or model.hidden_size // model.num_heads,
        max_position_embeddings=model.context_length,
        rms_norm_eps=1e-5,
        rope_theta=model.rope_base,
        tie_word_embeddings=model.tied,
        **variant.hf_settings,
    )
    hf = LlamaForCausalLM(config).double().eval()
    converted = to_hf(weights, model.num_heads, model.num_kv_heads)
    state = {name: torch.from_numpy(values.copy()) for name, values in converted.items()}
    if model.tied:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    hf.load_state_dict(state, strict=True)
    return hf


def make() -> dict[str, npt.NDArray[np.float32] | npt.NDArray[np.uint32]]:
    golden = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, variant in VARIANTS.items():
            path = write_tiny_model(Path(scratch) / f"{name}.gguf", variant.model)
            weights = read_weights(path)
            hf = hf_model(variant.model, variant, weights)
            ids = torch.tensor([token_ids(len(weights["token_embd.weight"]))])
            with torch.no_grad():
                logits = hf(ids).logits[0, list(POSITIONS)]
            golden[name] = logits.float().numpy()
            # Tells a change of the weights (another random stream) from one of the results.
            golden[f"{name}.crc"] = np.uint32(weights_checksum(weights))
    return golden


def weights_checksum(weights: Weights) -> int:
    checksum = 0
    for name in sorted(weights):
        checksum = zlib.crc32(weights[name].tobytes(), checksum)
    return checksum


def check(made: dict[str, npt.NDArray[np.float32]]) -> int:
    failures = 0
    with np.load(GOLDEN) as golden:
        for name, values in made.items():
            difference = np.abs(golden[name].astype(np.float64) - values).max()
            limit = 0 if name.endswith(".crc") else TOLERANCE * np.abs(values).max()
            if difference > limit:
                print(f"{name}: differs by {difference:g}, the limit is {limit:g}")
                failures += 1
    print(f"{len(made)} golden values of Llama variants checked, {failures} differ")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the golden file")
    arguments = parser.parse_args()
    made = make()
    if arguments.check:
        return int(check(made) > 0)
    np.savez_compressed(GOLDEN, **made)
    print(f"wrote {GOLDEN} ({GOLDEN.stat().st_size} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
