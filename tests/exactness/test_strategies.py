"""Answers are the same, bit for bit, under every strategy, budget and number of seats."""

from __future__ import annotations

from typing import Any

import pytest
from questions import QUESTIONS, Answer, Load, ask

from shoal import _native
from shoal._native import kernels

pytestmark = pytest.mark.exactness

# The defaults, 32 seats and a budget of 512, are those of test_cached_prefixes.py.
SETTINGS: list[dict[str, Any]] = [
    {"scheduler": "static", "max_num_seqs": 8},
    {"scheduler": "static", "max_num_seqs": 32, "skip_padding": True},
    {
        "scheduler": "dynamic",
        "max_num_seqs": 16,
        "max_num_batched_tokens": 300,
        "preferred_batch_sizes": (4, 8),
    },
    {"enable_chunked_prefill": False, "enable_prefix_caching": False},
    {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_threads": 2},
    {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_threads": 1},
    {"max_num_seqs": 3, "long_prefill_token_threshold": 21, "max_num_prefill_tokens": 40},
]


@pytest.mark.parametrize(
    "settings",
    SETTINGS,
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_answers_in_batches_equal_those_alone(
    load: Load, alone: list[Answer], settings: dict[str, Any]
) -> None:
    with load(**settings) as llm:
        assert ask(llm, QUESTIONS) == alone
        assert llm.stats.num_blocks_used == 0


def test_a_single_seat_and_a_tiny_budget_change_nothing(load: Load, alone: list[Answer]) -> None:
    with load(max_num_seqs=1, max_num_batched_tokens=5) as llm:
        assert ask(llm, QUESTIONS[:50]) == alone[:50]


@pytest.mark.parametrize(
    "isa",
    [i for i in kernels.instruction_sets() if i not in ("portable", _native.default_isa())],
)
def test_other_instruction_sets_are_exact_too(load: Load, isa: str) -> None:
    with load(max_num_seqs=1, enable_prefix_caching=False, instruction_set=isa) as llm:
        assert llm.info.isa == isa
        alone = ask(llm, QUESTIONS[:100])
    with load(instruction_set=isa) as llm:
        assert ask(llm, QUESTIONS)[:100] == alone


def test_the_questions_use_what_they_are_about(alone: list[Answer]) -> None:
    stops = [stop for answer in alone for stop in answer.stop_reasons]
    assert len(alone) == 300
    assert sum(isinstance(stop, str) for stop in stops) >= 20
    assert sum(isinstance(stop, int) for stop in stops) >= 10
    assert sum(len(answer.texts) > 1 for answer in alone) >= 20
    assert sum(answer.prompt_logprobs is not None for answer in alone) >= 20
    assert sum(question.params.seed is not None for question in QUESTIONS) >= 100
    assert sum(question.params.repetition_penalty != 1 for question in QUESTIONS) >= 50
    assert sum(len(set(texts)) > 1 for texts in (answer.texts for answer in alone)) >= 20
