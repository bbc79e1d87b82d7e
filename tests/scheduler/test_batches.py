"""What static and dynamic batching do alike once a batch has started."""

from __future__ import annotations

from typing import Any

import pytest
from driving import Driver, make_request, shares

from shoal.config import ConfigError, EngineConfig
from shoal.request import FinishReason
from shoal.scheduler.interface import QueueFullError, StepResult

STRATEGIES = pytest.mark.parametrize("strategy", ["static", "dynamic"])


def batch_of(strategy: str, *lengths: tuple[int, int], **settings: Any) -> Driver:
    """A driver with requests a, b, ... of these prompt and output lengths, as one batch."""
    driver = Driver(
        settings={"scheduler": strategy, "max_num_seqs": len(lengths), "max_queue_delay": 0.0}
        | settings
    )
    for name, (num_prompt_tokens, max_tokens) in zip("abcdef", lengths, strict=False):
        driver.arrive(name, num_prompt_tokens, max_tokens)
    return driver


@STRATEGIES
def test_a_finished_row_is_computed_as_padding_until_its_batch_ends(strategy: str) -> None:
    driver = batch_of(strategy, (5, 1), (6, 3))
    driver.run()
    steps = driver.executor.steps
    assert [shares(step) for step in steps] == [
        {"a": 5, "b": 6},
        {"a": 1, "b": 1},
        {"a": 1, "b": 1},
    ]
    assert [[row.is_padding for row in step.requests] for step in steps] == [
        [False, False],
        [True, False],
        [True, False],
    ]
    assert [len(driver.tokens_of(name)) for name in "ab"] == [1, 3]


@STRATEGIES
def test_without_padding_a_finished_row_keeps_its_place_and_is_not_computed(strategy: str) -> None:
    driver = batch_of(strategy, (5, 1), (6, 3), skip_padding=True)
    driver.arrive("late", 5, max_tokens=1)
    driver.run()
    assert [shares(step) for step in driver.executor.steps] == [
        {"a": 5, "b": 6},
        {"b": 1},
        {"b": 1},
        {"late": 5},
    ]
    assert [step.num_slots for step in driver.executor.steps] == [2, 2, 2, 1]


@STRATEGIES
@pytest.mark.parametrize("skip_padding", [False, True])
def test_all_answers_of_a_batch_leave_with_its_slowest(strategy: str, skip_padding: bool) -> None:
    driver = batch_of(strategy, (5, 1), (6, 4), (7, 2), skip_padding=skip_padding)
    for _ in range(3):
        driver.step()
        assert driver.outputs == []
    driver.step()
    assert set(driver.finished) == {"a", "b", "c"}
    for output in driver.outputs:
        assert len(output.new_token_ids) == driver.requests[output.request_id].max_tokens
        assert output.times is not None
        assert output.times.first_token == output.times.finished == 3.0


@STRATEGIES
def test_nobody_joins_a_running_batch(strategy: str) -> None:
    driver = batch_of(strategy, (5, 3), (6, 3))
    driver.step()
    driver.arrive("late", 5, max_tokens=1)
    driver.step_until(lambda step: "a" in driver.finished)
    assert all("late" not in shares(step) for step in driver.executor.steps)
    driver.run()
    assert shares(driver.executor.steps[-1]) == {"late": 5}


@pytest.mark.parametrize(("strategy", "budget"), [("static", 512), ("dynamic", 10_000)])
def test_all_prompts_are_computed_before_the_first_row_decodes(strategy: str, budget: int) -> None:
    driver = batch_of(strategy, (400, 2), (300, 2), (10, 2), max_num_batched_tokens=budget)
    assert [shares(driver.step()) for _ in range(3)] == [
        {"a": 400, "b": 112},
        {"b": 188, "c": 10},
        {"a": 1, "b": 1, "c": 1},
    ]


@STRATEGIES
def test_slots_count_finished_rows_and_empty_seats_while_others_wait(strategy: str) -> None:
    driver = batch_of(strategy, (5, 1), (5, 4), max_num_seqs=3)
    driver.step()
    driver.arrive("late", 5, max_tokens=1)
    driver.step_until(lambda step: "b" in driver.finished)
    stats = driver.scheduler.stats()
    assert stats.num_slots == 2 + 3 + 3 + 3
    assert stats.num_useful_slots == 1 + 4
    assert stats.slot_utilization == 5 / 11


@STRATEGIES
def test_a_row_that_fails_ends_with_its_batch_and_harms_nobody(strategy: str) -> None:
    driver = batch_of(strategy, (5, 3), (6, 3))
    driver.step()
    step = driver.schedule()
    result = driver.executor.execute(step)
    del result.sampled["a"]
    result.errors["a"] = "not finite"
    driver.update(step, result)
    assert [row.request.request_id for row in driver.step().requests] == ["b"]
    assert driver.finished["a"].error == "not finite"
    assert driver.reason_of("b") is FinishReason.LENGTH
    driver.check_idle()


@STRATEGIES
def test_rows_stop_waiting_for_a_prefix_whose_row_has_failed(strategy: str) -> None:
    driver = Driver(settings={"scheduler": strategy, "max_num_seqs": 2, "max_queue_delay": 0.0})
    for name in "ab":
        driver.arrive(name, 40, max_tokens=2, cache_scope=("salt", ""))
    step = driver.schedule()
    assert shares(step) == {"a": 40}  # b waits for its blocks
    driver.update(step, StepResult(errors={"a": "it failed"}))
    assert shares(driver.step()) == {"b": 40}
    driver.run()
    assert driver.reason_of("b") is FinishReason.LENGTH


@STRATEGIES
def test_rows_with_one_prefix_compute_it_once(strategy: str) -> None:
    driver = Driver(settings={"scheduler": strategy, "max_num_seqs": 3, "max_queue_delay": 0.0})
    for name in "abc":
        driver.arrive(name, 40, max_tokens=2, cache_scope=("salt", ""))
    assert [shares(driver.step()) for _ in range(2)] == [{"a": 40}, {"b": 8, "c": 8}]
    driver.run()
    assert [driver.finished[name].num_cached_tokens for name in "abc"] == [0, 32, 32]


@STRATEGIES
def test_an_aborted_row_leaves_at_once_and_the_batch_goes_on(strategy: str) -> None:
    driver = batch_of(strategy, (5, 9), (6, 3))
    driver.step()
    driver.abort("a")
    assert shares(driver.step()) == {"b": 1}
    driver.run()
    assert driver.finish_times["b"] == 2.0


@STRATEGIES
def test_an_abort_of_the_slowest_releases_the_others(strategy: str) -> None:
    driver = batch_of(strategy, (5, 9), (6, 1))
    driver.step()
    driver.abort("a")
    step = driver.schedule()
    assert [output.request_id for output in step.ended] == ["b"]
    assert not driver.scheduler.has_work()


@STRATEGIES
def test_a_batch_takes_what_the_pool_holds_to_the_end_and_never_preempts(strategy: str) -> None:
    driver = Driver(
        num_blocks=10,
        settings={"scheduler": strategy, "max_num_seqs": 4, "max_queue_delay": 0.0},
    )
    for name in "abcd":  # 4 blocks each at their ends
        driver.arrive(name, 4, max_tokens=60)
    assert shares(driver.step()) == {"a": 4, "b": 4}
    driver.run()
    assert driver.scheduler.stats().num_preemptions == 0


@STRATEGIES
def test_a_queue_that_is_full_refuses_exactly_what_exceeds_it(strategy: str) -> None:
    driver = batch_of(strategy, (5, 20), max_waiting_requests=1)
    driver.step()
    num_refused = 0
    for name in "wxyz":
        try:
            driver.arrive(name, 5, max_tokens=1)
        except QueueFullError:
            num_refused += 1
    assert num_refused == 3
    driver.run()
    assert set(driver.finished) == {"a", "w"}


@STRATEGIES
def test_work_that_nobody_waits_for_any_more_is_never_begun(strategy: str) -> None:
    driver = batch_of(strategy, (5, 5))
    driver.step()
    driver.arrive("b", 5, max_tokens=1)
    driver.abort("b")
    driver.arrive("c", 5, max_tokens=1)
    driver.run()
    assert all("b" not in shares(step) for step in driver.executor.steps)
    assert driver.reason_of("c") is FinishReason.LENGTH


@STRATEGIES
def test_a_batch_that_could_never_fill_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_waiting_requests \(100\) .* max_num_seqs \(256\)"):
        EngineConfig(scheduler=strategy, max_num_seqs=256, max_waiting_requests=100)


@STRATEGIES
def test_batches_of_one_work(strategy: str) -> None:
    driver = batch_of(strategy, (5, 2))
    driver.arrive("b", 6, max_tokens=1)
    driver.run()
    assert [shares(step) for step in driver.executor.steps] == [{"a": 5}, {"a": 1}, {"b": 6}]


@STRATEGIES
def test_urgent_requests_are_in_the_first_batch(strategy: str) -> None:
    driver = batch_of(strategy, (5, 1), (5, 1))
    driver.add(make_request("urgent", 5, max_tokens=1, priority=-1))
    assert shares(driver.step()) == {"urgent": 5, "a": 5}
