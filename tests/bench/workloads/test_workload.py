import math
import random
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.bench.workloads.lengths import parse_lengths
from shoal.bench.workloads.workload import (
    ExponentialLengths,
    LengthRange,
    Workload,
    WorkloadError,
    generate_requests,
    ordinary_token_ids,
)
from shoal.model.loader import open_model
from shoal.model.tokenizer import Tokenizer

VOCABULARY = range(100, 5000)


def lengths(workload, vocabulary=VOCABULARY):
    requests = generate_requests(workload, vocabulary)
    return [(len(request.prompt_token_ids), request.max_tokens) for request in requests]


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 20))
def test_a_seed_gives_the_same_requests_again(seed, num_requests):
    workload = Workload(num_requests=num_requests, seed=seed)
    assert generate_requests(workload, VOCABULARY) == generate_requests(workload, VOCABULARY)


def test_the_requests_of_a_seed_stay_the_same_from_version_to_version():
    workload = Workload(num_requests=4, seed=0)
    assert lengths(workload) == [(367, 199), (683, 166), (419, 177), (226, 82)]
    assert generate_requests(workload, VOCABULARY)[0].prompt_token_ids[:3] == [2445, 737, 3522]


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 50), st.integers(0, 50))
def test_lengths_stay_within_their_ranges(input_low, input_span, output_low, output_span):
    workload = Workload(
        input_len=LengthRange(input_low, input_low + input_span),
        output_len=LengthRange(output_low, output_low + output_span),
    )
    for num_input, num_output in lengths(workload):
        assert input_low <= num_input <= input_low + input_span
        assert output_low <= num_output <= output_low + output_span


def test_both_ends_of_a_range_occur():
    drawn = {num_input for num_input, _ in lengths(Workload(input_len=LengthRange(3, 6)))}
    assert drawn == {3, 4, 5, 6}


def test_lengths_do_not_depend_on_the_vocabulary():
    workload = Workload(num_requests=10)
    assert lengths(workload, range(7)) == lengths(workload, range(100_000))


def test_prompts_differ_within_a_run_and_between_seeds():
    prompts = [
        tuple(request.prompt_token_ids[:16])
        for seed in range(3)
        for request in generate_requests(Workload(num_requests=20, seed=seed), VOCABULARY)
    ]
    assert len(set(prompts)) == len(prompts)


def test_prompts_are_made_of_the_given_tokens_alone():
    requests = generate_requests(Workload(num_requests=5), [7, 9])
    assert {token_id for request in requests for token_id in request.prompt_token_ids} == {7, 9}


def test_ordinary_tokens_are_all_but_the_special_ones(model_path):
    tokenizer = Tokenizer.from_gguf(open_model(model_path).metadata)
    ordinary = ordinary_token_ids(tokenizer)
    assert all(low < high for low, high in pairwise(ordinary))
    missing = set(range(tokenizer.vocab_size)) - set(ordinary)
    assert tokenizer.eos_token_id in missing
    assert all(tokenizer.is_special(token_id) for token_id in missing)


@pytest.mark.parametrize(
    ("text", "expected"), [("50:800", LengthRange(50, 800)), ("128", LengthRange(128, 128))]
)
def test_a_length_range_is_read(text, expected):
    assert LengthRange.parse(text) == expected


@pytest.mark.parametrize("text", ["", "a", "5:", ":5", "5:4", "0", "-3:4", "1:2:3", "1.5"])
def test_a_wrong_length_range_is_refused(text):
    with pytest.raises(WorkloadError):
        LengthRange.parse(text)


def test_exponential_lengths_are_read_and_drawn_with_their_mean_and_cap():
    lengths = parse_lengths("exp:100:400")
    assert lengths == ExponentialLengths(100, 400)
    rng = random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(20_000)]
    assert min(drawn) == 1
    assert max(drawn) == 400
    # The mean of an exponential distribution that is cut at four times its mean.
    assert fmean(drawn) == pytest.approx(100 * (1 - math.exp(-4)) + 0.5, rel=0.03)


@pytest.mark.parametrize("text", ["exp", "exp:5", "exp:9:8", "exp:0:8", "exp:a:8", "exp:1:2:3"])
def test_wrong_exponential_lengths_are_refused(text):
    with pytest.raises(WorkloadError, match="exp"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"trace": Path("t"), "input_len": LengthRange(1, 2)}, "input_len and output_len"),
        ({"trace": Path("t"), "output_len": LengthRange(1, 2)}, "input_len and output_len"),
        ({"trace": Path("t"), "dataset": Path("d")}, "trace contradicts dataset"),
        ({"dataset": Path("d"), "input_len": LengthRange(1, 2)}, "input_len contradicts dataset"),
        ({"trace_start": 3.0}, "trace_start needs trace"),
        ({"trace_duration": 3.0}, "trace_duration needs trace"),
        ({"trace_max_input": 3}, "trace_max_input needs trace"),
        ({"trace_max_output": 3}, "trace_max_output needs trace"),
        ({"trace": Path("t"), "trace_start": -1.0}, "trace_start must be 0 or more, got -1"),
        ({"trace": Path("t"), "trace_duration": 0.0}, "trace_duration must be above 0, got 0"),
        ({"trace": Path("t"), "trace_max_input": 0}, "trace_max_input must be at least 1, got 0"),
        ({"shared_prefix_len": -1}, "shared_prefix_len must be 0 or more, got -1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, named):
    with pytest.raises(WorkloadError, match=named):
        Workload(**settings)


def test_a_workload_without_requests_is_refused():
    with pytest.raises(WorkloadError, match="num_requests must be at least 1, got 0"):
        Workload(num_requests=0)


def test_an_empty_vocabulary_is_refused():
    with pytest.raises(WorkloadError, match="no ordinary tokens"):
        generate_requests(Workload(), [])
