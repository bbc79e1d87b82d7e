"""How prompts share the steps of continuous batching with each other and with streams."""

from __future__ import annotations

from driving import Driver, make_request, shares


def test_a_prompt_of_several_steps_leaves_half_of_them_to_those_behind_it() -> None:
    driver = Driver(num_blocks=600, settings={"max_num_batched_tokens": 64})
    driver.add(make_request("long", 4000), make_request("short", 20, max_tokens=1))
    assert shares(driver.step()) == {"long": 44, "short": 20}
    assert shares(driver.step()) == {"long": 64}


def test_what_nobody_else_wants_goes_to_the_prompts_of_the_step() -> None:
    driver = Driver(num_blocks=600, settings={"max_num_batched_tokens": 64})
    driver.add(make_request("long", 4000), make_request("longer", 5000))
    assert shares(driver.step()) == {"long": 48, "longer": 16}


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
