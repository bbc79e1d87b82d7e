"""Settings that make no sense are refused with the value and what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shoal import EngineConfig, RequestOptions
from shoal.config import ConfigError
from shoal.request import InvalidParameterError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scheduler": "foo"}, "scheduler must be one of static, dynamic, continuous, got 'foo'"),
        ({"queue_timeout_action": "drop"}, "must be one of reject, delay, got 'drop'"),
        ({"instruction_set": "sse"}, "one of None, portable, avx2, avx512, amx, got 'sse'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number of at least 1, got 0"),
        ({"max_num_seqs": 2.5}, "whole number"),
        ({"max_num_seqs": True}, "whole number"),
        ({"enable_prefix_caching": "no"}, "must be True or False, got 'no'"),
        ({"max_queue_time": 0.0}, "max_queue_time must be above 0 seconds"),
        ({"max_total_time": math.nan}, "max_total_time must be above 0 seconds"),
        ({"scheduler": "dynamic", "max_queue_delay": -1.0}, "max_queue_delay must be 0 or more"),
        ({"max_queue_delay": 1.0}, "a setting of static and dynamic batching"),
        ({"preferred_batch_sizes": (4,)}, "a setting of dynamic batching"),
        ({"scheduler": "dynamic", "preferred_batch_sizes": (64,)}, "between 1 and max_num_seqs"),
        ({"scheduler": "static", "enable_chunked_prefill": False}, "of continuous batching"),
        ({"scheduler": "static", "max_waiting_requests": 8}, "a batch could never fill"),
        ({"max_num_batched_tokens": 8}, "must be at least max_num_seqs"),
        (
            {"enable_chunked_prefill": False, "long_prefill_token_threshold": 9},
            "needs enable_chunked_prefill",
        ),
    ],
    ids=str,
)
def test_a_setting_without_sense_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("scheduler", "budget"), [("static", 512), ("dynamic", 16384), ("continuous", 512)]
)
def test_the_token_budget_has_a_default_for_each_strategy(scheduler: Any, budget: int) -> None:
    assert EngineConfig(scheduler=scheduler).token_budget == budget
    assert EngineConfig(scheduler=scheduler, max_num_batched_tokens=99).token_budget == 99


def test_only_a_server_bounds_how_long_a_static_batch_waits() -> None:
    assert EngineConfig(scheduler="static").queue_delay == math.inf
    assert EngineConfig(scheduler="static").for_serving().queue_delay == 1.0
    chosen = EngineConfig(scheduler="static", max_queue_delay=math.inf)
    assert chosen.for_serving().queue_delay == math.inf
    assert EngineConfig(scheduler="dynamic").for_serving().queue_delay == 0.05


@pytest.mark.parametrize(
    "options",
    [
        {"priority": 1.5},
        {"priority": True},
        {"priority": "1"},
        {"priority": 1001},
        {"cache_salt": 1},
        {"cache_salt": "x" * 257},
        {"use_prefix_cache": "no"},
        {"max_queue_time": 0.0},
        {"max_total_time": math.inf},
    ],
    ids=str,
)
def test_an_option_of_the_wrong_kind_or_size_is_named(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(InvalidParameterError) as refusal:
        RequestOptions(**options)
    assert refusal.value.parameter == name
