"""Sampling of one row: against a plain NumPy sampler, statistics, and the hard cases."""

from __future__ import annotations

import math
from array import array
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal._native import SamplingSettings, kernels

Floats = npt.NDArray[np.float32]
ISAS = kernels.instruction_sets()
BEST = ISAS[-1]
OK, NOT_FINITE, ALL_BANNED = 0, 1, 2


@dataclass(frozen=True)
class Params:
    seed: int = 0
    sample_index: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    end_token_ids: list[int] = field(default_factory=list)
    logit_bias: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    status: int
    token_id: int
    logprob: float
    top: list[tuple[int, float]]


def sample(
    logits: Floats,
    params: Params,
    *,
    prompt: tuple[int, ...] = (),
    outputs: tuple[int, ...] = (),
    position: int = 0,
    num_top: int = -1,
    isa: str = BEST,
) -> Outcome:
    status, token_ids, logprobs, top_ids, top_logprobs = kernels.sample(
        isa,
        logits,
        SamplingSettings(**asdict(params)),
        array("i", prompt),
        array("i", outputs),
        position,
        num_top,
    )
    top = list(zip(top_ids[0].tolist(), top_logprobs[0].tolist(), strict=True))
    return Outcome(int(status[0]), int(token_ids[0]), float(logprobs[0]), top)


def changed_logits(
    logits: Floats, params: Params, prompt: tuple[int, ...], outputs: tuple[int, ...]
) -> npt.NDArray[np.float64]:
    changed = logits.astype(np.float64)
    for token in {*prompt, *outputs}:
        penalty = params.repetition_penalty
        changed[token] = (
            changed[token] / penalty if changed[token] > 0 else changed[token] * penalty
        )
        changed[token] -= params.frequency_penalty * outputs.count(token)
        changed[token] -= params.presence_penalty * (token in outputs)
    for token, bias in params.logit_bias:
        changed[token] += bias
    if len(outputs) < params.min_tokens:
        changed[params.end_token_ids] = -np.inf
    return changed


def distribution(logits: npt.NDArray[np.float64], params: Params) -> npt.NDArray[np.float64]:
    """The probabilities after temperature, top_k, top_p and min_p."""
    scaled = logits / params.temperature
    order = np.lexsort((np.arange(len(logits)), -scaled))
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scaled[order] - scaled.max())
    weights /= weights.sum()
    if params.top_p < 1:
        weights = weights[: np.searchsorted(np.cumsum(weights), params.top_p) + 1]
    weights[weights < params.min_p * weights[0]] = 0
    probabilities = np.zeros(len(logits))
    probabilities[order[: len(weights)]] = weights / weights.sum()
    return probabilities


def uniform(params: Params, position: int) -> float:
    counter = [position & 0xFFFFFFFF, position >> 32, params.sample_index, 0]
    words = kernels.philox(counter, params.seed % 2**64)
    return ((words[0] << 21) | (words[1] >> 11)) * 2.0**-53


def random_logits(size: int, seed: int, scale: float = 3.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


# Known answers of Random123's kat_vectors.
@pytest.mark.parametrize(
    ("counter", "seed", "words"),
    [
        ([0] * 4, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            2**64 - 1,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_numbers(
    counter: list[int], seed: int, words: list[int]
) -> None:
    assert kernels.philox(counter, seed) == words


def test_natural_log_is_exact_to_the_last_bits() -> None:
    for x in [1.0, 2.0, 0.5, math.sqrt(2), 1 + 2**-50, 3.7e-300, 49152.0, 1.5e300]:
        assert math.isclose(kernels.natural_log(x), math.log(x), rel_tol=3e-16, abs_tol=1e-16)


PARAMS = [
    Params(),
    Params(temperature=0.3),
    Params(temperature=3.0, top_k=40),
    Params(top_k=1),
    Params(top_p=0.9),
    Params(top_p=0.05),
    Params(temperature=5.0, top_p=0.999),
    Params(min_p=0.1),
    Params(temperature=4.0, min_p=1e-5),
    Params(temperature=2.0, min_p=1e-12),
    Params(top_k=100, top_p=0.8, min_p=0.02, temperature=1.5),
    Params(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    Params(min_tokens=10, end_token_ids=[1, 2], logit_bias=[(3, 4.0), (5, -100.0)]),
]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("size", [7, 1000, 49152])
def test_takes_the_token_that_a_plain_sampler_takes(params: Params, size: int) -> None:
    prompt, outputs = (0, 1, 1, 6), (2, 3, 3, 3)
    for position in range(20):
        logits = random_logits(size, seed=position)
        params = replace(params, seed=1234567 + position)
        got = [
            sample(logits, params, prompt=prompt, outputs=outputs, position=position, isa=isa)
            for isa in ISAS
        ]
        assert all(outcome == got[0] for outcome in got)
        probabilities = distribution(changed_logits(logits, params, prompt, outputs), params)
        cumulative = np.cumsum(probabilities)
        draw = uniform(params, position)
        low = cumulative[got[0].token_id] - probabilities[got[0].token_id]
        # The weights are computed in float32, so the borders between tokens are that fine.
        assert low - 1e-5 <= draw <= cumulative[got[0].token_id] + 1e-5
        assert probabilities[got[0].token_id] > 0


@pytest.mark.parametrize(
    "params",
    [
        Params(),
        Params(temperature=0.5),
        Params(top_k=5),
        Params(top_p=0.7),
        Params(min_p=0.2),
        Params(temperature=2.0, top_k=12, top_p=0.9, min_p=0.05),
    ],
)
def test_frequencies_are_the_probabilities(params: Params) -> None:
    logits = random_logits(20, seed=3, scale=1.0)
    draws = 20_000
    counts = np.zeros(20)
    for position in range(draws):
        counts[sample(logits, params, position=position).token_id] += 1
    expected = distribution(logits.astype(np.float64), params) * draws
    kept = expected > 0
    assert not counts[~kept].any()
    chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
    freedom = max(int(kept.sum()) - 1, 1)
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)  # far beyond the 99.9 % quantile


def test_seed_sample_and_position_each_change_the_draw_and_nothing_else_does() -> None:
    logits = random_logits(5000, seed=4, scale=0.1)
    base = Params(seed=7)
    token = sample(logits, base, position=9).token_id
    assert sample(logits, base, position=9).token_id == token
    assert sample(logits, base, position=10).token_id != token
    assert sample(logits, replace(base, seed=8), position=9).token_id != token
    assert sample(logits, replace(base, sample_index=1), position=9).token_id != token


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(num_top: int) -> None:
    logits = random_logits(49152, seed=5)
    params = Params(
        temperature=0.2, repetition_penalty=1.5, logit_bias=[(7, 50.0)], top_k=3, seed=2
    )
    outcomes = [sample(logits, params, prompt=(1, 2), num_top=num_top, isa=isa) for isa in ISAS]
    assert all(outcome == outcomes[0] for outcome in outcomes)
    wide = logits.astype(np.float64)
    logprobs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    assert outcomes[0].token_id == 7
    assert outcomes[0].logprob == pytest.approx(logprobs[7], abs=2e-6)
    best = np.argsort(-logprobs, kind="stable")[:num_top]
    assert [token for token, _ in outcomes[0].top] == best.tolist()
    np.testing.assert_allclose([p for _, p in outcomes[0].top], logprobs[best], atol=2e-6)


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = np.zeros(1000, np.float32)
    logits[[300, 17, 999]] = 2.0
    assert sample(logits, Params(temperature=0)).token_id == 17
    assert [token for token, _ in sample(logits, Params(temperature=0), num_top=3).top] == [
        17,
        300,
        999,
    ]


def test_top_k_of_one_is_greedy_even_when_hot() -> None:
    logits = np.full(500, 1.0, np.float32)
    logits[123] = np.nextafter(np.float32(1.0), np.float32(2.0))
    for position in range(50):
        assert sample(logits, Params(top_k=1, temperature=100.0), position=position).token_id == 123


@pytest.mark.parametrize("size", [10, 49152])
def test_equal_logits_are_cut_by_the_lowest_ids(size: int) -> None:
    logits = np.full(size, -3.0, np.float32)
    by_k = [sample(logits, Params(top_k=4), position=p).token_id for p in range(100)]
    assert set(by_k) == {0, 1, 2, 3}
    by_p = [sample(logits, Params(top_p=0.5), position=p).token_id for p in range(100)]
    assert max(by_p) < size / 2
    anything = [sample(logits, Params(), position=p).token_id for p in range(100)]
    assert max(anything) >= size / 2


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = random_logits(1000, seed=6)
    token = sample(logits, Params(temperature=temperature), position=3).token_id
    assert token == int(logits.argmax())


def test_minus_infinity_is_never_chosen() -> None:
    logits = np.full(600, -np.inf, np.float32)
    logits[[11, 599]] = [1.0, 1.5]
    drawn = {
        sample(logits, params, position=position).token_id
        for position in range(200)
        for params in (Params(), Params(top_k=50), Params(top_p=0.99), Params(min_p=1e-9))
    }
    assert drawn == {11, 599}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 15, 16, 999])
@pytest.mark.parametrize("isa", ISAS)
def test_logits_that_are_not_finite_are_an_error(bad: float, place: int, isa: str) -> None:
    logits = random_logits(1000, seed=7)
    logits[place] = bad
    for params in (Params(), Params(temperature=0), Params(top_p=0.9)):
        assert sample(logits, params, num_top=2, isa=isa).status == NOT_FINITE


def test_only_minus_infinity_is_an_error() -> None:
    assert sample(np.full(20, -np.inf, np.float32), Params()).status == NOT_FINITE


def test_end_tokens_are_banned_until_min_tokens() -> None:
    logits = np.zeros(8, np.float32)
    logits[5] = 10.0
    params = Params(temperature=0, min_tokens=2, end_token_ids=[5])
    assert sample(logits, params, outputs=(1,)).token_id == 0
    assert sample(logits, params, outputs=(1, 1)).token_id == 5


def test_banning_every_token_is_an_error() -> None:
    params = Params(min_tokens=1, end_token_ids=[0, 1, 2])
    assert sample(np.zeros(3, np.float32), params).status == ALL_BANNED


FILTERS = st.builds(
    Params,
    seed=st.integers(0, 2**64 - 1),
    temperature=st.floats(0.0625, 10, width=32),
    top_k=st.integers(0, 250),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.floats(-40, 40, width=32) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=200
    ),
    params=FILTERS,
)
def test_filters_keep_what_their_definitions_keep(values: list[float], params: Params) -> None:
    logits = np.array(values, np.float32)
    outcome = sample(logits, params, position=1)
    assert outcome.status == OK
    # Filters slightly wider than asked for leave room for the rounding of weights at the border.
    wider = replace(params, top_p=min(1.0, params.top_p + 1e-5), min_p=params.min_p * (1 - 1e-5))
    assert distribution(logits.astype(np.float64) + 0.0, wider)[outcome.token_id] > 0
