"""Batching never changes an answer: token ids and logprobs are compared bit for bit.

64 requests of random lengths on the real model, a third greedy, a third sampled with seeds, a third
sampled with penalties and filters as well. The answers of each request alone are the reference.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from shoal import LLM, SamplingParams
from shoal._native import kernels

pytestmark = pytest.mark.exactness

NUM_REQUESTS = 64
MAX_PROMPT_TOKENS = 150
MAX_OUTPUT_TOKENS = 24
LONG_OUTPUT_TOKENS = 140  # of every eighth: they outgrow what admission keeps free for them


@dataclass(frozen=True, slots=True)
class Question:
    prompt_token_ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    logprobs: list[Any]
    text: str
    finish_reason: str


def _sampling(index: int, rng: random.Random) -> dict[str, Any]:
    if index % 3 == 0:
        return {"temperature": 0.0}
    seeded = {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": rng.randrange(2**31)}
    if index % 3 == 1:
        return seeded
    return seeded | {
        "top_k": rng.choice([0, 20, 200]),
        "top_p": rng.choice([0.8, 0.95]),
        "min_p": rng.choice([0.0, 0.02]),
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {rng.randrange(49152): 2.0},
    }


def _questions() -> list[Question]:
    rng = random.Random(20)
    questions = []
    for index in range(NUM_REQUESTS):
        prompt = [rng.randrange(1000, 40000) for _ in range(rng.randint(1, MAX_PROMPT_TOKENS))]
        params = SamplingParams(
            max_tokens=LONG_OUTPUT_TOKENS if index % 8 == 0 else rng.randint(1, MAX_OUTPUT_TOKENS),
            ignore_eos=index % 2 == 0,
            logprobs=index % 4,
            **_sampling(index, rng),
        )
        questions.append(Question(prompt, params))
    return questions


QUESTIONS = _questions()


def _ask(llm: LLM, questions: Sequence[Question]) -> list[Answer]:
    outputs = llm.generate([q.prompt_token_ids for q in questions], [q.params for q in questions])
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [Answer(o.token_ids, o.logprobs or [], o.text, str(o.finish_reason)) for o in outputs]


@pytest.fixture(scope="module")
def alone(model_path: Path) -> list[Answer]:
    with LLM(str(model_path), max_num_seqs=1, kv_cache_memory_mib=64, num_threads=1) as llm:
        return [_ask(llm, [question])[0] for question in QUESTIONS]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 2},
        {"max_num_seqs": 7, "num_threads": 1},
        {"max_num_seqs": 7, "max_num_batched_tokens": 16},
        {"max_num_seqs": 32, "max_num_batched_tokens": 64},
        {"max_num_seqs": 32, "max_num_batched_tokens": 512, "num_threads": 2},
        {"max_num_seqs": 32, "max_num_batched_tokens": 512, "num_threads": 1},
        {"max_num_seqs": 32, "long_prefill_token_threshold": 21},
        {"max_num_seqs": 32, "enable_chunked_prefill": False},
    ],
    ids=lambda settings: "-".join(f"{name}={value}" for name, value in settings.items()),
)
def test_batched_answers_equal_those_alone(
    model_path: Path, alone: list[Answer], settings: dict[str, Any]
) -> None:
    with LLM(str(model_path), kv_cache_memory_mib=256, **settings) as llm:
        assert _ask(llm, QUESTIONS) == alone


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_arrival_changes_nothing(
    model_path: Path, alone: list[Answer], seed: int
) -> None:
    order = random.Random(seed).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    with LLM(str(model_path), max_num_seqs=7, kv_cache_memory_mib=256) as llm:
        answers = _ask(llm, [QUESTIONS[i] for i in order])
    assert answers == [alone[i] for i in order]


def test_preemption_changes_nothing(model_path: Path, alone: list[Answer]) -> None:
    with LLM(str(model_path), max_num_seqs=32, kv_cache_memory_mib=12) as llm:
        assert _ask(llm, QUESTIONS) == alone
        assert llm.stats.num_preemptions > 0
        assert llm.stats.num_blocks_used == 0


@pytest.mark.parametrize("isa", [isa for isa in kernels.instruction_sets() if isa != "portable"])
def test_the_instruction_set_changes_nothing(
    model_path: Path, alone: list[Answer], isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ISA", isa)
    with LLM(str(model_path), max_num_seqs=32, kv_cache_memory_mib=256) as llm:
        assert llm.info.isa == isa
        assert _ask(llm, QUESTIONS) == alone


def test_another_seed_gives_another_answer(model_path: Path) -> None:
    prompt = [2000] * 5
    with LLM(str(model_path), max_num_seqs=3, kv_cache_memory_mib=64) as llm:
        params = [SamplingParams(seed=seed, max_tokens=16) for seed in (1, 1, 2)]
        first, again, other = llm.generate([prompt] * 3, params)
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids
