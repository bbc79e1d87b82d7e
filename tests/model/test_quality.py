"""The executors reproduce HF transformers on real text; oracle/quality_golden.py says how."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from oracle.quality_golden import QualityGolden, whole_sequence_step

from shoal._native import kernels
from shoal.executor.native import NativeExecutor
from shoal.executor.reference import ReferenceExecutor
from shoal.model.loader import ModelFile, open_model

MAX_MEAN_KL = 0.005  # nats
MIN_TOP1_AGREEMENT = 0.97
NUMPY_TOLERANCE = 1e-4  # of the position's largest absolute logit


@pytest.fixture(scope="module")
def golden() -> QualityGolden:
    return QualityGolden.load()


@pytest.fixture(scope="module")
def model(model_path: Path) -> ModelFile:
    return open_model(model_path)


def test_the_numpy_executor_computes_the_same_logits(
    model: ModelFile, golden: QualityGolden
) -> None:
    length = golden.token_ids.shape[1]
    executor = ReferenceExecutor(model.record_program(length), num_blocks=length // 16)
    for row, token_ids in enumerate(golden.token_ids.tolist()):
        logits = executor.logits(whole_sequence_step(token_ids), all_rows=True)["sequence"]
        expected = golden.logits[row]
        errors = np.abs(logits[golden.logit_positions[row]] - expected).max(axis=1)
        assert (errors <= NUMPY_TOLERANCE * np.abs(expected).max(axis=1)).all()
        assert abs(golden.divergence(row, logits).mean()) < 1e-6
        assert golden.agreement(row, logits).mean() > 0.999  # ties may fall either way


@pytest.mark.parametrize("isa", [isa for isa in kernels.instruction_sets() if isa != "portable"])
def test_the_native_executor_stays_close_to_float32(
    model: ModelFile, golden: QualityGolden, isa: str
) -> None:
    num_positions = golden.token_ids.size
    assert num_positions >= 2000
    executor = NativeExecutor(
        model.record_program(golden.token_ids.shape[1]),
        kv_cache_bytes=1 << 27,
        num_valid_tokens=model.num_tokens,
        isa=isa,
    )
    divergence, agreement = [], []
    for row, token_ids in enumerate(golden.token_ids.tolist()):
        logits = executor.logits(whole_sequence_step(token_ids), all_rows=True)["sequence"]
        divergence.append(golden.divergence(row, logits))
        agreement.append(golden.agreement(row, logits))
    executor.close()
    print(
        f"{num_positions} positions: mean KL {np.mean(divergence):.5f} nats, "
        f"top-1 agreement {np.mean(agreement):.2%}"
    )
    assert np.mean(divergence) <= MAX_MEAN_KL
    assert np.mean(agreement) >= MIN_TOP1_AGREEMENT
