"""Who else is in the batch, and with which parameters, changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import NUM_LONG, QUESTIONS, Answer, Load, ask

from shoal import LLM, SamplingParams

pytestmark = pytest.mark.exactness

PROMPT = "The quick brown fox"
SEEDED = SamplingParams(seed=42, temperature=0.8, max_tokens=8, logprobs=1)


@pytest.fixture(scope="module")
def llm(load: Load) -> Iterator[LLM]:
    with load(max_num_seqs=6, max_num_batched_tokens=48) as llm:
        yield llm


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, len(QUESTIONS) - NUM_LONG - 1), min_size=1, max_size=10, unique=True)
)
def test_any_mates_in_any_order_change_nothing(
    llm: LLM, alone: list[Answer], indices: list[int]
) -> None:
    assert ask(llm, [QUESTIONS[index] for index in indices]) == [alone[i] for i in indices]


@pytest.mark.parametrize(
    "mate",
    [
        SamplingParams(temperature=1.5, max_tokens=9),  # no seed
        SamplingParams(seed=7, temperature=1.0, top_k=3, max_tokens=4),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=12),
    ],
    ids=["without a seed", "with another seed", "greedy with penalties"],
)
def test_a_seed_gives_one_answer_beside_any_mate(llm: LLM, mate: SamplingParams) -> None:
    alone = llm.generate(PROMPT, SEEDED)[0]
    before = llm.generate(["Hello", PROMPT], [mate, SEEDED])[1]
    behind = llm.generate([PROMPT, PROMPT, "Hello"], [SEEDED, mate, mate])[0]
    for output in (before, behind):
        assert output.token_ids == alone.token_ids
        assert output.logprobs == alone.logprobs


def test_equal_seeds_agree_and_others_differ(llm: LLM) -> None:
    params = [SamplingParams(seed=seed, max_tokens=12) for seed in (1, 1, 2)]
    first, again, other = llm.generate([PROMPT] * 3, params)
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


def test_the_first_of_several_samples_is_the_one_that_a_single_one_would_be(llm: LLM) -> None:
    params = [SamplingParams(n=n, seed=5, max_tokens=8, logprobs=0) for n in (1, 3)]
    single, three = llm.generate([PROMPT] * 2, params)
    assert three.completions[0].token_ids == single.token_ids
    assert three.logprobs == single.logprobs
    assert len({tuple(completion.token_ids) for completion in three.completions}) == 3
