"""How prompts share the steps of continuous batching with each other and with streams."""

from __future__ import annotations

import pytest
from driving import Driver, make_request, shares

from shoal.scheduler.continuous import MAX_BYPASSES


def test_a_prompt_of_several_steps_leaves_half_of_them_to_those_behind_it() -> None:
    driver = Driver(num_blocks=600, settings={"max_num_batched_tokens": 64})
    driver.add(make_request("long", 4000), make_request("short", 20, max_tokens=1))
    assert shares(driver.step()) == {"long": 44, "short": 20}
    assert shares(driver.step()) == {"long": 64}


def test_what_nobody_else_wants_goes_to_the_prompts_of_the_step() -> None:
    driver = Driver(num_blocks=600, settings={"max_num_batched_tokens": 64})
    driver.add(make_request("long", 4000), make_request("longer", 5000))
    assert shares(driver.step()) == {"long": 52, "longer": 12}


@pytest.mark.parametrize("num_long", [4, 10, 20])
def test_however_many_long_prompts_run_a_short_one_gets_its_token_in_the_next_step(
    num_long: int,
) -> None:
    driver = Driver(num_blocks=num_long * 510, settings={"max_num_batched_tokens": 512})
    for index in range(num_long):
        driver.arrive(f"long {index}", 8000, max_tokens=1)
        driver.step()
    driver.arrive("short", 10, max_tokens=1)
    assert shares(driver.step())["short"] == 10


def test_long_prompts_beyond_the_budget_are_passed_by_short_ones_a_bounded_number_of_times() -> (
    None
):
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 64}
    driver = Driver(num_blocks=6000, settings=settings)
    for index in range(12):
        driver.arrive(f"long {index}", 4000, max_tokens=1)
    driver.step()
    waiting = [name for name in driver.requests if name not in driver.running()]
    assert waiting  # there is nothing left for them but what is kept for short ones
    for index in range(MAX_BYPASSES + 4):
        driver.arrive(f"short {index}", 2, max_tokens=1)
        driver.step()
    assert driver.requests[waiting[0]].num_bypasses == MAX_BYPASSES


def test_prompts_get_their_own_budget_beside_those_who_decode() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 64, "max_num_prefill_tokens": 10})
    driver.add(make_request("a", 10, max_tokens=9))
    driver.step()
    driver.arrive("b", 25, max_tokens=9)
    driver.arrive("c", 3, max_tokens=9)
    assert shares(driver.step()) == {"a": 1, "b": 7, "c": 3}
    assert shares(driver.step()) == {"a": 1, "c": 1, "b": 10}
    assert shares(driver.step()) == {"a": 1, "c": 1, "b": 8}


def stream_beside_a_long_prompt(**settings: object) -> list[dict[str, int]]:
    """The steps in which a prompt of 4,000 tokens is computed while a stream decodes."""
    driver = Driver(num_blocks=400, settings=settings)
    driver.add(make_request("stream", 4))
    driver.step()
    driver.arrive("long", 4000, max_tokens=1)
    driver.step_until(lambda step: "long" in driver.finished)
    return [shares(step) for step in driver.executor.steps[1:]]


def test_chunked_a_prompt_of_thousands_keeps_a_stream_waiting_for_one_budget_at_most() -> None:
    steps = stream_beside_a_long_prompt(max_num_batched_tokens=512)
    assert len(steps) == -(-4000 // 511)
    for step in steps:
        assert step["stream"] == 1
        assert sum(step.values()) <= 512


def test_whole_a_prompt_of_thousands_keeps_a_stream_waiting_for_all_of_it() -> None:
    steps = stream_beside_a_long_prompt(max_num_batched_tokens=512, enable_chunked_prefill=False)
    assert steps == [{"stream": 1, "long": 4000}]
