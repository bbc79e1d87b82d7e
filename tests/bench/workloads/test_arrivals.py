from itertools import pairwise
from statistics import mean, pstdev

import pytest

from shoal.bench.workloads.arrivals import (
    ArrivalConfig,
    ArrivalError,
    ClosedLoop,
    gamma_arrivals,
    trace_arrivals,
)
from shoal.bench.workloads.workload import WorkloadRequest

REQUESTS = [WorkloadRequest([1], 1, arrival=time) for time in (0.0, 1.0, 5.0)]


def gaps(times):
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0, 1e6])
def test_gaps_have_the_mean_of_the_rate_and_the_variation_of_the_burstiness(burstiness):
    found = gaps(gamma_arrivals(5.0, burstiness, 20_000, seed=1).times)
    assert mean(found) == pytest.approx(1 / 5, rel=0.05)
    assert pstdev(found) / mean(found) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_the_same_seed_gives_the_same_gaps_at_every_rate():
    slow, fast = (gamma_arrivals(rate, 1.0, 50, seed=3).times for rate in (1.0, 8.0))
    assert [time / 8 for time in slow] == pytest.approx(fast)
    assert gamma_arrivals(1.0, 1.0, 50, seed=4).times != slow


def test_the_first_request_comes_at_once():
    assert gamma_arrivals(5.0, 1.0, 1, seed=0).times == (0.0,)
    assert gamma_arrivals(5.0, 1.0, 2, seed=0).times[0] == 0.0


def test_the_offered_rate_is_that_of_the_times():
    assert trace_arrivals(REQUESTS, 1.0).offered_rate == 2 / 5
    assert trace_arrivals(REQUESTS, 0.5).offered_rate == 2 / 2.5
    assert gamma_arrivals(float("inf"), 1.0, 9, seed=0).offered_rate is None


def test_an_infinite_rate_sends_all_at_once():
    assert ArrivalConfig(request_rate=float("inf")).arrivals(REQUESTS, 0).times == (0.0, 0.0, 0.0)


def test_a_trace_is_replayed_at_its_times_or_stretched():
    assert ArrivalConfig().arrivals(REQUESTS, 0).times == (0.0, 1.0, 5.0)
    assert ArrivalConfig(time_scale=2.0).arrivals(REQUESTS, 0).times == (0.0, 2.0, 10.0)


def test_a_trace_without_times_needs_something_else():
    requests = [WorkloadRequest([1], 1)]
    with pytest.raises(ArrivalError, match="the trace tells no arrivals"):
        ArrivalConfig().arrivals(requests, 0)
    assert ArrivalConfig(concurrency=3).arrivals(requests, 7) == ClosedLoop(3, 0.0, 7)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"concurrency": 4, "request_rate": 2.0}, ("concurrency", "request_rate")),
        ({"concurrency": 4, "burstiness": 2.0}, ("concurrency", "burstiness")),
        ({"concurrency": 4, "time_scale": 2.0}, ("concurrency", "time_scale")),
        ({"request_rate": 4.0, "time_scale": 2.0}, ("request_rate", "time_scale")),
        ({"burstiness": 4.0, "time_scale": 2.0}, ("burstiness", "time_scale")),
        ({"think_time": 1.0, "request_rate": 2.0}, ("think_time", "concurrency")),
        ({"request_rate": 0.0}, ("request_rate", "got 0")),
        ({"request_rate": float("nan")}, ("request_rate", "got nan")),
        ({"request_rate": 1.0, "burstiness": -1.0}, ("burstiness", "got -1")),
        ({"request_rate": 1.0, "burstiness": float("inf")}, ("burstiness", "finite")),
        ({"concurrency": 0}, ("concurrency", "got 0")),
        ({"concurrency": 1, "think_time": -1.0}, ("think_time", "got -1")),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, named):
    with pytest.raises(ArrivalError) as caught:
        ArrivalConfig(**settings)
    for name in named:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "say how requests arrive"),
        ({"burstiness": 2.0}, "burstiness needs request_rate"),
        ({"time_scale": 2.0}, "time_scale needs trace"),
    ],
)
def test_settings_that_do_not_say_when_to_send_are_refused(settings, named):
    with pytest.raises(ArrivalError, match=named):
        ArrivalConfig(**settings).check_complete(has_trace=False)
