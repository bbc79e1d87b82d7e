"""A prompt whose beginning is cached is answered as if it were not."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from questions import (
    NUM_LONG,
    QUESTIONS,
    Answer,
    Load,
    Question,
    ask,
    ask_one_by_one,
    random_tokens,
)

from shoal import LLM, SamplingParams

pytestmark = pytest.mark.exactness

SHORT = slice(0, len(QUESTIONS) - NUM_LONG)


@pytest.fixture(scope="module")
def cached(load: Load) -> Iterator[LLM]:
    with load() as llm:
        yield llm


@pytest.fixture(scope="module")
def uncached(load: Load) -> Iterator[LLM]:
    with load(max_num_seqs=1, enable_prefix_caching=False, kv_cache_memory_mib=64) as llm:
        yield llm


def test_a_warm_cache_and_an_emptied_one_change_nothing(cached: LLM, alone: list[Answer]) -> None:
    assert ask(cached, QUESTIONS) == alone
    cold_hits = cached.stats.prefix_cache_hits
    assert ask(cached, QUESTIONS[SHORT]) == alone[SHORT]
    assert cached.stats.prefix_cache_hits > 2 * cold_hits
    assert cached.reset_prefix_cache() > 0
    assert cached.stats.num_blocks_cached == 0
    assert ask(cached, QUESTIONS[:100]) == alone[:100]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48, 49])
def test_all_full_blocks_but_the_last_token_come_from_the_cache(cached: LLM, length: int) -> None:
    prompt = random_tokens(random.Random(length), length)
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2)
    first, second = (cached.generate([prompt], params)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 1) // 16 * 16
    assert (second.token_ids, second.logprobs) == (first.token_ids, first.logprobs)


def test_penalties_see_the_prompt_whether_it_is_cached_or_not(cached: LLM, uncached: LLM) -> None:
    prompt = random_tokens(random.Random(1), 40)
    question = Question(
        prompt,
        SamplingParams(
            temperature=0.0,
            max_tokens=12,
            logprobs=3,
            repetition_penalty=1.5,
            presence_penalty=1.0,
            frequency_penalty=1.0,
            logit_bias=dict.fromkeys(prompt[:5], 15.0),
        ),
    )
    miss, hit = ask_one_by_one(cached, [question] * 2)
    assert cached.generate([prompt], question.params)[0].num_cached_tokens == 32
    assert miss == hit == ask(uncached, [question])[0]
    mates = [Question(prompt, SamplingParams(temperature=0.0, max_tokens=12)), question, question]
    assert ask(cached, mates)[1:] == [miss, miss]


def test_prompt_logprobs_are_whole_and_equal_cached_uncached_and_in_chunks(
    cached: LLM, uncached: LLM, load: Load
) -> None:
    prompt = random_tokens(random.Random(2), 33)
    question = Question(prompt, SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    expected = ask(uncached, [question])[0]
    # The first token has no log-probability; the list begins with that of the second.
    assert [entry.token_id for entry in expected.prompt_logprobs or []] == prompt[1:]
    # A question without them fills the cache first.
    plain = Question(prompt, SamplingParams(temperature=0.0, max_tokens=2))
    assert ask_one_by_one(cached, [question, plain, question])[::2] == [expected] * 2
    with load(max_num_seqs=2, max_num_batched_tokens=8) as chunked:
        assert ask_one_by_one(chunked, [question, plain, question])[::2] == [expected] * 2
        assert ask(chunked, [question, plain, question])[::2] == [expected] * 2


def test_a_hit_and_a_miss_in_one_batch_are_answered_as_alone(cached: LLM, uncached: LLM) -> None:
    rng = random.Random(3)
    shared = random_tokens(rng, 37)
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=0)
    questions = [
        Question(prompt, params)
        for prompt in (
            shared + random_tokens(rng, 4),
            random_tokens(rng, 21),
            shared[:20] + random_tokens(rng, 9),
            shared,
        )
    ]
    ask(cached, [Question(shared, params)])
    hits = cached.stats.prefix_cache_hits
    assert ask(cached, questions) == ask_one_by_one(uncached, questions)
    assert cached.stats.prefix_cache_hits == hits + 32 + 0 + 16 + 32
