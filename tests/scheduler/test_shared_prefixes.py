"""Requests that begin alike compute their beginning once, whoever comes first."""

from __future__ import annotations

import pytest
from driving import Driver, shares

from shoal.request import FinishReason
from shoal.scheduler import continuous
from shoal.scheduler.interface import StepResult

SALT = ("salt", "")
SYSTEM_PROMPT = [1000 + position for position in range(100)]


def ask(driver: Driver, name: str, own: list[int], max_tokens: int = 2, **fields: object) -> None:
    scope = fields.pop("cache_scope", SALT)
    prompt = SYSTEM_PROMPT + own
    driver.arrive(name, 0, max_tokens, prompt=prompt, cache_scope=scope, **fields)


def test_a_later_prompt_starts_behind_the_blocks_that_are_there() -> None:
    driver = Driver()
    ask(driver, "a", [1])
    driver.run()
    ask(driver, "b", [2, 3])
    step = driver.step()
    assert shares(step) == {"b": 102 - 96}
    assert step.requests[0].num_computed_tokens == 96
    driver.run()
    assert [driver.finished[name].num_cached_tokens for name in "ab"] == [0, 96]


def test_the_blocks_of_an_answer_are_found_again_in_the_next_turn() -> None:
    driver = Driver()
    ask(driver, "a", [1], max_tokens=60)
    driver.run()
    ask(driver, "b", [1, *driver.tokens_of("a"), 5])
    driver.run()
    # The last token of an answer is never computed.
    assert driver.finished["b"].num_cached_tokens == (100 + 1 + 60 - 1) // 16 * 16


def test_prompts_that_come_together_wait_for_the_one_that_computes_their_beginning() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 64})
    for index, name in enumerate("abc"):
        ask(driver, name, [index])
    assert [shares(driver.step()) for _ in range(3)] == [
        {"a": 64},
        {"a": 37},
        {"a": 1, "b": 5, "c": 5},
    ]
    driver.run()
    stats = driver.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (3 * 101, 2 * 96)


def test_others_are_admitted_past_one_that_waits_for_its_beginning() -> None:
    driver = Driver(settings={"max_num_batched_tokens": 64})
    ask(driver, "a", [1])
    ask(driver, "b", [2])
    driver.arrive("other", 30, max_tokens=1)
    assert shares(driver.step()) == {"a": 34, "other": 30}
    assert driver.requests["b"].num_bypasses == 0


@pytest.mark.parametrize("end", ["abort", "error", "time limit"])
def test_when_the_one_that_computes_a_beginning_ends_the_next_computes_it(end: str) -> None:
    driver = Driver(settings={"max_num_batched_tokens": 64})
    ask(driver, "a", [1], max_total_time=1.0 if end == "time limit" else None)
    ask(driver, "b", [2])
    step = driver.schedule()
    if end == "error":
        driver.update(step, StepResult(errors={"a": "it failed"}))
    else:
        driver.update(step, driver.executor.execute(step))
    driver.now = 1.0
    if end == "abort":
        driver.abort("a")
    num_cached = 0 if end == "error" else 64
    assert driver.step().requests[0].num_computed_tokens == num_cached
    driver.run()
    assert driver.finished["b"].num_cached_tokens == num_cached
    assert driver.reason_of("b") is FinishReason.LENGTH


def test_a_preempted_request_takes_up_its_blocks_that_nobody_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(continuous, "WATERMARK_BLOCKS", 0)
    driver = Driver(num_blocks=10, settings={"max_num_seqs": 2})
    driver.arrive("a", 60, max_tokens=50, cache_scope=SALT)
    driver.arrive("b", 0, 50, prompt=list(range(500, 560)), cache_scope=SALT)
    driver.step_until(lambda step: bool(step.preempted_request_ids))
    step = driver.step_until(lambda step: "b" in shares(step))
    assert step.requests[-1].request.request_id == "b"
    assert step.requests[-1].num_computed_tokens > 0
    driver.run()
    assert driver.finished["b"].num_cached_tokens == 0  # in its first run, which is what counts


def test_other_salts_and_those_who_opted_out_share_nothing() -> None:
    driver = Driver()
    ask(driver, "a", [1])
    driver.run()
    ask(driver, "other salt", [1], cache_scope=("salt", "x"))
    ask(driver, "opted out", [1], cache_scope=None)
    driver.run()
    assert driver.finished["other salt"].num_cached_tokens == 0
    assert driver.finished["opted out"].num_cached_tokens == 0
    ask(driver, "b", [1])
    driver.run()
    assert driver.finished["b"].num_cached_tokens == 96


def test_samples_of_one_request_share_its_prompt_though_nothing_is_cached() -> None:
    driver = Driver()
    for index in range(3):
        ask(driver, f"a{index}", [1], 9, cache_scope=("request", "a"), sample_index=index)
    assert [shares(driver.step()) for _ in range(2)] == [
        {"a0": 101},
        {"a0": 1, "a1": 5, "a2": 5},
    ]
    assert driver.kv_cache.num_used_blocks == 6 + 3
    driver.run()


def test_prompt_logprobs_need_every_token_computed() -> None:
    driver = Driver()
    ask(driver, "a", [1])
    driver.run()
    ask(driver, "b", [1], prompt_logprobs=0)
    assert shares(driver.step()) == {"b": 101}
    driver.run()
    scored = [entry for output in driver.outputs for entry in output.prompt_logprobs]
    assert [entry.token_id for entry in scored] == [*SYSTEM_PROMPT[1:], 1]


def test_a_reset_forgets_and_those_who_run_keep_their_blocks() -> None:
    driver = Driver()
    ask(driver, "a", [1])
    driver.run()
    ask(driver, "b", [2], max_tokens=9)
    driver.step()
    assert driver.scheduler.reset_prefix_cache() == 6
    assert driver.kv_cache.num_cached_blocks == 0
    ask(driver, "c", [3])
    assert shares(driver.step()) == {"b": 1, "c": 101}
    driver.run()


def test_a_prompt_that_nearly_fills_the_pool_is_answered_again_and_again() -> None:
    driver = Driver(num_blocks=8)
    for name in ("first", "cached", "third"):
        ask(driver, name, list(range(22)), max_tokens=50)  # 122 of 128 tokens
        driver.run()
        assert len(driver.tokens_of(name)) == 6
        assert driver.reason_of(name) is FinishReason.LENGTH


def test_admission_counts_blocks_that_others_hold_as_free_of_charge() -> None:
    driver = Driver(num_blocks=12)
    ask(driver, "a", [1], max_tokens=4)  # 7 blocks
    driver.step()
    for name in "bcde":  # one block each beside those of a
        ask(driver, name, [ord(name)], max_tokens=4)
    assert set(shares(driver.step())) == {"a", "b", "c", "d", "e"}
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0
