"""Neither preemption nor the order of arrival changes an answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from questions import QUESTIONS, Answer, Load, ask

from shoal._native import default_isa, kernels
from shoal.model.loader import open_model
from shoal.scheduler import continuous

pytestmark = pytest.mark.exactness

TINY_POOL = 34  # blocks


def test_a_pool_that_is_too_small_changes_nothing(
    load: Load, alone: list[Answer], monkeypatch: pytest.MonkeyPatch, model_path: Path
) -> None:
    config = open_model(model_path).config
    block_bytes = kernels.kv_block_bytes(
        default_isa(), config.num_layers, config.num_kv_heads, config.head_dim
    )
    monkeypatch.setattr(continuous, "WATERMARK_BLOCKS", 0)  # run into each other more often
    with load(kv_cache_memory_mib=round(TINY_POOL * block_bytes / 2**20)) as llm:
        assert ask(llm, QUESTIONS) == alone
        assert llm.stats.num_preemptions > 5
        assert llm.stats.num_blocks_used == 0


def test_preemption_by_priority_changes_nothing(load: Load, alone: list[Answer]) -> None:
    # A queue this short lets urgent questions arrive while others run.
    with load(max_num_seqs=5, max_waiting_requests=6, enable_priority_preemption=True) as llm:
        assert ask(llm, QUESTIONS) == alone
        assert llm.stats.num_preemptions > 20


@pytest.mark.parametrize("seed", [1])
def test_the_order_of_arrival_changes_nothing(load: Load, alone: list[Answer], seed: int) -> None:
    order = random.Random(seed).sample(range(len(QUESTIONS)), len(QUESTIONS))
    with load(max_num_seqs=7) as llm:
        answers = ask(llm, [QUESTIONS[index] for index in order])
    assert answers == [alone[index] for index in order]
