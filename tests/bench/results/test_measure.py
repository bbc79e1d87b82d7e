import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.bench.results.measure import Distribution, RequestTimeline, Slo, measure
from shoal.config import ConfigError


def timeline(sent, first_token, last_token, num_output_tokens, num_input_tokens=10):
    return RequestTimeline(
        sent=sent,
        first_token=first_token,
        last_token=last_token,
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
    )


def test_the_times_of_a_request_follow_their_definitions():
    # Sent at 10 s, waits until 12.5 s for its first token, then four more, 0.25 s apart.
    request = timeline(10.0, 12.5, 13.5, num_output_tokens=5)
    assert request.ttft == 2.5
    assert request.e2e == 3.5
    assert request.tpot == 0.25


def test_a_single_token_has_no_time_per_output_token():
    assert timeline(0.0, 1.0, 1.0, num_output_tokens=1).tpot is None


def test_the_figures_of_a_run_follow_their_definitions():
    requests = [
        timeline(1.0, 2.0, 5.0, num_output_tokens=4, num_input_tokens=100),
        timeline(1.5, 4.5, 9.0, num_output_tokens=10, num_input_tokens=20),
    ]
    run = measure(requests, num_failed=1)
    assert (run.num_completed, run.num_failed) == (2, 1)
    assert run.duration == 8.0  # from the first send to the last token
    assert run.requests_per_second == 2 / 8
    assert run.input_tokens_per_second == 120 / 8
    assert run.output_tokens_per_second == 14 / 8
    assert run.ttft.mean == 2.0
    assert run.tpot.mean == (1.0 + 0.5) / 2
    assert run.e2e.max == 7.5


def test_requests_of_one_token_stay_out_of_the_time_per_output_token():
    requests = [timeline(0.0, 1.0, 1.0, 1), timeline(0.0, 1.0, 3.0, 3)]
    run = measure(requests, num_failed=0)
    assert run.tpot == Distribution(mean=1.0, p50=1.0, p90=1.0, p99=1.0, max=1.0)


def test_no_request_of_more_than_one_token_gives_no_time_per_output_token():
    assert measure([timeline(0.0, 1.0, 1.0, 1)], num_failed=0).tpot is None


def test_a_run_without_a_completed_request_has_no_figures():
    with pytest.raises(ValueError, match="none of 3 requests completed"):
        measure([], num_failed=3)


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=200))
def test_percentiles_interpolate_between_ranks(values):
    def percentile(fraction):
        rank = fraction * (len(values) - 1)
        low = sorted(values)[int(rank)]
        high = sorted(values)[min(int(rank) + 1, len(values) - 1)]
        return low + (high - low) * (rank - int(rank))

    distribution = Distribution.of(values)
    assert distribution.p50 == pytest.approx(percentile(0.50))
    assert distribution.p90 == pytest.approx(percentile(0.90))
    assert distribution.p99 == pytest.approx(percentile(0.99))
    assert distribution.mean == pytest.approx(np.mean(values))
    assert distribution.max == max(values)


def test_gaps_are_pooled_over_requests_and_the_first_token_is_none():
    requests = [
        RequestTimeline(0.0, 5.0, 6.5, 1, 3, chunk_times=(5.0, 5.5, 6.5)),
        RequestTimeline(0.0, 9.0, 9.25, 1, 2, chunk_times=(9.0, 9.25)),
    ]
    run = measure(requests, num_failed=0)
    assert run.num_itls == 3
    assert run.itl == Distribution.of([0.5, 1.0, 0.25])


def test_an_answer_that_was_not_streamed_has_no_gaps():
    run = measure([timeline(0.0, 1.0, 3.0, 3)], num_failed=0)
    assert (run.num_itls, run.itl, run.num_tokens_without_own_chunk) == (0, None, 0)


@pytest.mark.parametrize(
    ("slo", "num_good"),
    [
        (Slo(ttft=1.0), 3),
        (Slo(tpot=0.5), 2),  # a single token has no time per token to exceed
        (Slo(ttft=1.0, tpot=0.5), 2),
        (Slo(e2e=1.0), 1),
        (Slo(ttft=0.5), 0),
    ],
)
def test_a_good_request_meets_every_limit(slo, num_good):
    requests = [
        timeline(0.0, 1.0, 2.0, 3),  # ttft 1, tpot 0.5, e2e 2
        timeline(0.0, 1.0, 5.0, 3),  # ttft 1, tpot 2, e2e 5
        timeline(3.0, 4.0, 4.0, 1),  # ttft 1, no tpot, e2e 1
    ]
    run = measure(requests, num_failed=1, num_refused=1, slo=slo)
    assert run.num_good == num_good
    assert run.goodput == num_good / 5
    assert run.good_share == num_good / 5  # of all five requests


def test_without_limits_nothing_is_called_good():
    run = measure([timeline(0.0, 1.0, 2.0, 3)], num_failed=0, slo=Slo())
    assert (run.num_good, run.goodput, run.good_share) == (None, None, None)


def test_the_duration_begins_with_the_first_send_even_if_that_request_failed():
    run = measure([timeline(4.0, 5.0, 6.0, 3)], num_failed=1, start=2.0)
    assert run.duration == 4.0


def test_the_hit_rate_is_of_the_tokens_of_all_prompts():
    requests = [
        RequestTimeline(0.0, 1.0, 1.0, 100, 1, num_cached_tokens=80),
        RequestTimeline(0.0, 1.0, 1.0, 60, 1, num_cached_tokens=0),
    ]
    assert measure(requests, num_failed=0).prefix_cache_hit_rate == 0.5


def test_a_limit_that_nothing_can_meet_is_refused():
    with pytest.raises(ConfigError, match="slo_tpot must be above 0"):
        Slo(tpot=0.0)
