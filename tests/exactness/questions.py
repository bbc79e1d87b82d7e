"""300 questions that use everything an answer may depend on, in a fixed random order.

Most are short, so that many ways to compute them can be tried. The long ones are the last, where
they cost static batching the fewest padding rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal import LLM, RequestOptions, SamplingParams
from shoal.engine.inputs import DEFAULT_OPTIONS
from shoal.request import TokenLogprob

NUM_QUESTIONS = 300
NUM_LONG = 6  # answers that outgrow what admission keeps free for them
LONG_OUTPUT_TOKENS = 80
PREFIX_LENGTHS = (15, 16, 17, 31, 32, 33, 47, 48, 49)  # around the borders of blocks
QUESTIONS_OF_A_PREFIX = 5

OPENINGS = (
    "The capital of France is",
    "Once upon a time",
    "The quick brown fox",
    "In the beginning",
    "def add(a, b):",
    "1, 2, 3,",
    "Dear Sir or Madam,",
    "Roses are red, violets are",
    "Water boils at a temperature of",
    "My favourite colour is",
    "To be or not to be,",
    "List three animals:\n-",
    "Emoji for a happy face: ",
    "Der Hund läuft durch",
)
STOP_STRINGS = (",", ".", "\n", " the", " a ", "e", "is not", " of the ", "://", "ing ")
STOP_TOKEN_IDS = (28, 30, 198, 253, 260, 282, 284)  # , . \n " a" " the" " of" " and"

Load = Callable[..., LLM]
"""Loads the real model; takes the engine's settings."""


@dataclass(frozen=True, slots=True)
class Question:
    prompt: str | list[int]
    params: SamplingParams
    options: RequestOptions = DEFAULT_OPTIONS


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that must be the same; logprobs are compared bit for bit."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob] | None]
    texts: list[str]
    finish_reasons: list[str]
    stop_reasons: list[str | int | None]
    prompt_logprobs: list[TokenLogprob] | None = field(repr=False)


def ask(llm: LLM, questions: list[Question]) -> list[Answer]:
    """The answers to all questions, asked at once."""
    outputs = llm.generate(
        [question.prompt for question in questions],
        [question.params for question in questions],
        options=[question.options for question in questions],
    )
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [
        Answer(
            token_ids=[completion.token_ids for completion in output.completions],
            logprobs=[completion.logprobs for completion in output.completions],
            texts=[completion.text for completion in output.completions],
            finish_reasons=[str(completion.finish_reason) for completion in output.completions],
            stop_reasons=[completion.stop_reason for completion in output.completions],
            prompt_logprobs=output.prompt_logprobs,
        )
        for output in outputs
    ]


def ask_one_by_one(llm: LLM, questions: list[Question]) -> list[Answer]:
    """The answers to the questions, each asked when the one before is answered."""
    return [answer for question in questions for answer in ask(llm, [question])]


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40000) for _ in range(count)]


def _make_questions() -> list[Question]:
    rng = random.Random(20)
    questions = [
        _question(rng, prefix + random_tokens(rng, rng.choice([0, 1, 2, 15, 16, 17])))
        for prefix in (random_tokens(rng, length) for length in PREFIX_LENGTHS)
        for _ in range(QUESTIONS_OF_A_PREFIX)
    ]
    while len(questions) < NUM_QUESTIONS - NUM_LONG:
        questions.append(_question(rng, _own_prompt(rng)))
    rng.shuffle(questions)
    return questions + [_long_question(rng) for _ in range(NUM_LONG)]


def _long_question(rng: random.Random) -> Question:
    params = SamplingParams(
        max_tokens=LONG_OUTPUT_TOKENS, ignore_eos=True, **_how_to_choose(rng), **_how_to_report(rng)
    )
    return Question(random_tokens(rng, rng.randint(1, 40)), params, _options(rng))


def _question(rng: random.Random, prompt: str | list[int]) -> Question:
    max_tokens = rng.choice([1, rng.randint(2, 5), rng.randint(2, 5), rng.randint(6, 12)])
    params = _how_to_choose(rng) | _how_to_report(rng) | {"max_tokens": max_tokens}
    return Question(prompt, SamplingParams(**params | _how_to_stop(rng)), _options(rng))


def _own_prompt(rng: random.Random) -> str | list[int]:
    if rng.random() < 0.5:
        return rng.choice(OPENINGS)
    length = 150 if rng.random() < 0.08 else rng.choice([1, 2, rng.randint(3, 40)])
    return random_tokens(rng, length)


def _how_to_choose(rng: random.Random) -> dict[str, Any]:
    """Greedily, or drawn with a seed; every third with penalties and a bias."""
    params: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.65:
        params = {"temperature": rng.choice([0.7, 1.0, 1.3]), "seed": rng.randrange(2**31)}
        params["n"] = rng.choice([1] * 10 + [2, 3])
        if rng.random() < 0.5:
            params |= {"top_k": rng.choice([0, 20, 200]), "top_p": rng.choice([0.8, 0.95])}
            params["min_p"] = rng.choice([0.0, 0.02])
    if rng.random() < 0.33:
        params |= {
            "repetition_penalty": rng.choice([1.1, 1.3]),
            "presence_penalty": rng.choice([0.0, 0.5]),
            "frequency_penalty": rng.choice([0.0, 0.3]),
            "logit_bias": {rng.randrange(49152): 2.0, rng.choice(STOP_TOKEN_IDS): -3.0},
        }
    return params


def _how_to_report(rng: random.Random) -> dict[str, Any]:
    return {
        "logprobs": rng.choice([None, 0, 1, 3]),
        "prompt_logprobs": rng.choice([None] * 9 + [0, 2]),
    }


def _how_to_stop(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(8):
        case 0 | 1:
            return {
                "stop": tuple(rng.sample(STOP_STRINGS, 2)),
                "include_stop_str_in_output": rng.random() < 0.3,
                "max_tokens": rng.randint(5, 12),
            }
        case 2:
            return {
                "stop_token_ids": STOP_TOKEN_IDS,
                "min_tokens": rng.choice([0, 3, 5]),
                "max_tokens": rng.randint(5, 12),
            }
        case 3:
            return {"ignore_eos": True}
    return {}


def _options(rng: random.Random) -> RequestOptions:
    return RequestOptions(
        priority=rng.choice([0, 0, 0, -1, 1, 5]),
        cache_salt=rng.choice(["", "", "", "", "another"]),
        use_prefix_cache=rng.random() < 0.9,
    )


QUESTIONS = _make_questions()
