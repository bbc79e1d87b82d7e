"""Makes golden/quality.npz with HF transformers in float32, or checks it, or measures with it.

    python tests/oracle/make_quality.py MODEL.gguf [--check | --measure]

MODEL.gguf is SmolLM2-135M-Instruct (alias smollm2-135m). The texts lie in quality_texts.json with
their sources and licences. The weights that transformers loads are first compared with the `gguf`
package's dequantisation. `--measure` runs Shoal's native executor against the full logits of
transformers and prints the exact divergence beside the one that the golden file yields. Needs
torch, transformers and gguf.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from make_llama import read_weights, to_hf
from quality_golden import (
    GOLDEN,
    NUM_TAIL,
    NUM_TOP,
    SEQUENCE_LENGTH,
    QualityGolden,
    log_softmax,
    whole_sequence_step,
)

TEXTS = Path(__file__).parent / "quality_texts.json"
LOGIT_POSITIONS = ((3, 511), (100, 400), (31, 255), (16, 301), (77, 450))
CHECK_TOLERANCE = 1e-4  # of the largest logit; float32 sums differ between machines

Floats = npt.NDArray[np.float32]


def load(model: Path) -> PreTrainedModel:
    hf = AutoModelForCausalLM.from_pretrained(
        model.parent, gguf_file=model.name, dtype=torch.float32
    ).eval()
    config = hf.config
    expected = to_hf(read_weights(model), config.num_attention_heads, config.num_key_value_heads)
    state = hf.state_dict()
    for name, values in expected.items():
        np.testing.assert_array_equal(state[name].numpy(), values, err_msg=name)
    print(f"{len(expected)} tensors of transformers equal the gguf package's dequantisation")
    return hf


def tokenize(model: Path) -> npt.NDArray[np.int32]:
    tokenizer = AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)
    texts = [entry["text"] for entry in json.loads(TEXTS.read_text())]
    rows = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return np.array([row[:SEQUENCE_LENGTH] for row in rows], np.int32)


def all_logits(hf: PreTrainedModel, token_ids: npt.NDArray[np.int32]) -> Iterator[Floats]:
    for row in token_ids:
        with torch.no_grad():
            yield hf(torch.from_numpy(row[None].astype(np.int64))).logits[0].numpy()


def make(hf: PreTrainedModel, token_ids: npt.NDArray[np.int32]) -> QualityGolden:
    rng = np.random.default_rng(0)
    parts: dict[str, list[Any]] = {"top": [], "tail": [], "logits": []}
    for row, logits in enumerate(all_logits(hf, token_ids)):
        logprobs = log_softmax(logits)
        order = np.argsort(-logprobs, axis=1, kind="stable")
        top = order[:, :NUM_TOP]
        tail = np.stack([draw(rng, logprobs[i], order[i, NUM_TOP:]) for i in range(len(order))])
        for name, ids in (("top", top), ("tail", tail)):
            parts[name].append((ids, np.take_along_axis(logprobs, ids, axis=1)))
        parts["logits"].append(logits[list(LOGIT_POSITIONS[row])])
    return QualityGolden(
        token_ids=token_ids,
        top_ids=np.array([ids for ids, _ in parts["top"]], np.uint16),
        top_logprobs=np.array([values for _, values in parts["top"]], np.float32),
        tail_ids=np.array([ids for ids, _ in parts["tail"]], np.uint16),
        tail_logprobs=np.array([values for _, values in parts["tail"]], np.float32),
        logit_positions=np.array(LOGIT_POSITIONS, np.int32),
        logits=np.array(parts["logits"], np.float32),
    )


def draw(
    rng: np.random.Generator, logprobs: npt.NDArray[Any], candidates: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    weights = np.exp(logprobs[candidates])
    return rng.choice(candidates, NUM_TAIL, p=weights / weights.sum())


def check(hf: PreTrainedModel, token_ids: npt.NDArray[np.int32]) -> int:
    """Compare what transformers computes now with the golden file; returns an exit status."""
    golden = QualityGolden.load()
    if not np.array_equal(golden.token_ids, token_ids):
        print("the token ids of the texts differ")
        return 1
    worst = 0.0
    for row, logits in enumerate(all_logits(hf, token_ids)):
        logprobs, scale = log_softmax(logits), np.abs(logits).max()
        for ids, values in (
            (golden.top_ids[row], golden.top_logprobs[row]),
            (golden.tail_ids[row], golden.tail_logprobs[row]),
        ):
            now = np.take_along_axis(logprobs, ids.astype(int), axis=1)
            worst = max(worst, float(np.abs(now - values).max() / scale))
        difference = np.abs(logits[golden.logit_positions[row]] - golden.logits[row]).max()
        worst = max(worst, float(difference / scale))
    print(
        f"{token_ids.size} positions checked: largest difference {worst:.1e} of the largest "
        f"logit, the limit is {CHECK_TOLERANCE:g}"
    )
    return int(worst > CHECK_TOLERANCE)


def measure(model: Path, hf: PreTrainedModel) -> None:
    # Making and checking the golden values need nothing of what they judge.
    from shoal.executor.native import NativeExecutor
    from shoal.model.loader import open_model

    golden = QualityGolden.load()
    file = open_model(model)
    executor = NativeExecutor(
        file.record_program(SEQUENCE_LENGTH),
        kv_cache_bytes=1 << 28,
        num_valid_tokens=file.num_tokens,
    )
    exact, estimated, agreement = [], [], []
    for row, expected in enumerate(all_logits(hf, golden.token_ids)):
        step = whole_sequence_step(golden.token_ids[row].tolist())
        logits = executor.logits(step, all_rows=True)["sequence"]
        p, q = log_softmax(expected), log_softmax(logits)
        exact.append(np.sum(np.exp(p) * (p - q), axis=1))
        estimated.append(golden.divergence(row, logits))
        agreement.append(golden.agreement(row, logits))
    executor.close()
    print(f"positions {golden.token_ids.size}, instruction set {executor.isa}")
    print(f"mean KL {np.mean(exact):.5f} nats exact, {np.mean(estimated):.5f} by the golden file")
    print(f"largest KL {np.max(exact):.4f} nats; top-1 agreement {np.mean(agreement):.2%}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="the .gguf file of smollm2-135m")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the golden file")
    mode.add_argument("--measure", action="store_true", help="measure the native executor")
    arguments = parser.parse_args()
    hf = load(arguments.model)
    if arguments.measure:
        measure(arguments.model, hf)
        return 0
    token_ids = tokenize(arguments.model)
    if arguments.check:
        return check(hf, token_ids)
    make(hf, token_ids).save()
    print(f"wrote {GOLDEN} ({GOLDEN.stat().st_size} bytes)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
