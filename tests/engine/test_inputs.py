from __future__ import annotations

from typing import Any

import pytest

from shoal.config import EngineConfig
from shoal.engine.inputs import InputProcessor, ModelLimits
from shoal.request import InvalidParameterError, Request, RequestOptions, SamplingParams
from shoal.scheduler.interface import RequestRejectedError
from shoal.scheduler.limits import LengthLimits


def processor(seed: int | None = None) -> InputProcessor:
    lengths = LengthLimits(max_model_len=128, pool_tokens=112)
    return InputProcessor(
        ModelLimits(vocab_size=1000, eos_token_ids=(2,), lengths=lengths), EngineConfig(seed=seed)
    )


def process(token_ids: list[int], **params: Any) -> list[Request]:
    return processor().process("r", token_ids, SamplingParams(**params), arrival_time=1.5)


@pytest.mark.parametrize(
    ("parameter", "token_ids", "params"),
    [
        ("prompt", [1, 1000], {}),
        ("prompt", [-1], {}),
        ("prompt", [], {}),
        ("logit_bias", [1], {"logit_bias": {999_999: 5.0}}),
        ("stop_token_ids", [1], {"stop_token_ids": (999_999,), "min_tokens": 1}),
        ("stop_token_ids", [1], {"stop_token_ids": (-1,)}),
    ],
)
def test_token_ids_outside_the_vocabulary_are_refused(
    parameter: str, token_ids: list[int], params: dict[str, Any]
) -> None:
    with pytest.raises(InvalidParameterError) as refusal:
        process(token_ids, **params)
    assert refusal.value.parameter == parameter


def test_the_samples_of_a_question_share_its_time_in_the_queue() -> None:
    """The first has the limit; once it runs the question has been started."""
    requests = processor().process(
        "r",
        [1, 2],
        SamplingParams(n=3),
        RequestOptions(max_queue_time=2.0, max_total_time=9.0),
        arrival_time=0.0,
    )
    assert [request.max_queue_time for request in requests] == [2.0, None, None]
    assert [request.max_total_time for request in requests] == [9.0] * 3


@pytest.mark.parametrize(("num_tokens", "limit"), [(128, "context is 128"), (112, "holds 112")])
def test_a_prompt_without_room_for_a_token_is_refused_with_both_numbers(
    num_tokens: int, limit: str
) -> None:
    with pytest.raises(RequestRejectedError, match=f"{num_tokens} tokens .* {limit}"):
        process([1] * num_tokens)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "asked", "resolved"),
    [(100, None, 12), (100, 50, 12), (100, 5, 5), (111, 9, 1)],
)
def test_max_tokens_is_a_cap_within_what_fits(
    num_prompt_tokens: int, asked: int | None, resolved: int
) -> None:
    (request,) = process([1] * num_prompt_tokens, max_tokens=asked)
    assert request.max_tokens == resolved


def test_samples_share_the_seed_and_differ_in_their_index() -> None:
    requests = process([1, 2], n=3, seed=7, prompt_logprobs=1)
    assert [request.sample_index for request in requests] == [0, 1, 2]
    assert len({request.request_id for request in requests}) == 3
    assert {request.seed for request in requests} == {7}
    assert [r.sampling_params.prompt_logprobs for r in requests] == [1, None, None]


def test_drawn_seeds_differ_and_are_repeatable_with_a_seed_of_the_engine() -> None:
    def drawn(engine_seed: int | None) -> list[int]:
        inputs = processor(engine_seed)
        return [
            inputs.process("r", [1], SamplingParams(), arrival_time=0.0)[0].seed for _ in range(4)
        ]

    assert len(set(drawn(None))) == 4
    assert drawn(5) == drawn(5) != drawn(6)
