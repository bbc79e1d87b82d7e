import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.bench.results.measure import Slo
from shoal.bench.runs.capacity import (
    FIRST_RATE,
    HIGHEST_RATE,
    LOWEST_RATE,
    CapacityConfig,
    find_capacity,
)
from shoal.bench.workloads.arrivals import ArrivalConfig
from shoal.config import ConfigError


async def search(knee, precision=0.1, *, unloaded=True):
    """The capacity of a server that keeps every rate up to `knee`, and the rates tried."""
    tried = []

    async def is_kept(rate):
        tried.append(rate)
        return rate <= knee

    async def is_kept_unloaded():
        tried.append("unloaded")
        return unloaded

    return await find_capacity(is_kept, is_kept_unloaded, precision), tried


@given(st.floats(LOWEST_RATE, HIGHEST_RATE, exclude_max=True), st.floats(0.01, 1.0))
async def test_the_knee_is_found_within_the_precision(knee, precision):
    capacity, _ = await search(knee, precision)
    assert capacity.rate <= knee < capacity.too_high
    assert capacity.too_high <= capacity.rate * (1 + precision) * (1 + 1e-9)


@pytest.mark.parametrize("knee", [0.3, 1.0, 7.9, 100.0])
async def test_few_runs_are_needed(knee):
    _, tried = await search(knee)
    tried = [rate for rate in tried if rate != "unloaded"]
    assert len(tried) <= abs(math.log2(knee)) + 2 + math.ceil(math.log2(1 / math.log2(1.1)))
    assert len(set(tried)) == len(tried)


async def test_a_server_that_is_too_slow_at_every_rate_has_no_capacity():
    capacity, tried = await search(0.0)
    assert (capacity.rate, capacity.too_high) == (0.0, LOWEST_RATE)
    assert tried[-1] == LOWEST_RATE


async def test_a_server_that_is_never_too_slow_has_at_least_the_highest_rate():
    capacity, _ = await search(math.inf)
    assert (capacity.rate, capacity.too_high) == (HIGHEST_RATE, math.inf)


async def test_the_search_gives_up_if_the_slo_is_missed_without_any_load_too():
    capacity, tried = await search(0.0, unloaded=False)
    assert (capacity.rate, capacity.too_high) == (0.0, 0.0)
    assert tried == [FIRST_RATE, "unloaded"]


async def test_without_load_is_only_measured_if_the_first_rate_is_not_kept():
    _, tried = await search(5.0)
    assert "unloaded" not in tried
    _, tried = await search(0.3)
    assert tried[:3] == [FIRST_RATE, "unloaded", FIRST_RATE / 2]
    assert tried.count("unloaded") == 1


def test_a_run_is_long_enough_in_time_and_in_requests():
    config = CapacityConfig(find_capacity=True, capacity_seconds=30)
    assert config.num_requests(rate=0.5, at_least=96) == 96
    assert config.num_requests(rate=10.0, at_least=96) == 300


@pytest.mark.parametrize(
    ("capacity", "slo", "arrivals", "named"),
    [
        ({"find_capacity": True}, {}, {}, "find_capacity needs slo_ttft"),
        ({"find_capacity": True}, {"ttft": 1.0}, {"request_rate": 1.0}, "request_rate contradicts"),
        ({"find_capacity": True}, {"ttft": 1.0}, {"concurrency": 1}, "concurrency contradicts"),
        ({"find_capacity": True}, {"ttft": 1.0}, {"time_scale": 1.0}, "time_scale contradicts"),
        ({"slo_share": 0.5}, {"ttft": 1.0}, {"request_rate": 1.0}, "slo_share needs find_capacity"),
        ({"capacity_seconds": 5.0}, {}, {"request_rate": 1.0}, "capacity_seconds needs"),
    ],
)
def test_settings_that_contradict_a_search_are_refused(capacity, slo, arrivals, named):
    with pytest.raises(ConfigError, match=named):
        CapacityConfig(**capacity).check(Slo(**slo), ArrivalConfig(**arrivals))


@pytest.mark.parametrize(
    "settings",
    [{"slo_share": 0.0}, {"slo_share": 1.1}, {"capacity_seconds": 0.0}, {"capacity_precision": 0}],
)
def test_values_outside_their_range_are_refused(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=name):
        CapacityConfig(find_capacity=True, **settings)
