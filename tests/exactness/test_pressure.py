"""Neither preemption nor the order of arrival changes an answer."""

from __future__ import annotations

import random

import pytest
from questions import QUESTIONS, Answer, Load, ask

from shoal.scheduler import continuous

pytestmark = pytest.mark.exactness

TINY_POOL_MIB = 12  # 34 blocks


def test_a_pool_that_is_too_small_changes_nothing(
    load: Load, alone: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuous, "WATERMARK_BLOCKS", 0)  # run into each other more often
    with load(kv_cache_memory_mib=TINY_POOL_MIB) as llm:
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
