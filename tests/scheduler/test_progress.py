"""When a request ends, and what its last output says."""

from __future__ import annotations

import pytest
from driving import Driver, make_request

from shoal.request import FinishReason, Request
from shoal.scheduler.interface import RequestOutput, SampledToken, ScheduledStep, StepResult

EOS = 2


def answer_with(driver: Driver, token_ids: list[int]) -> list[RequestOutput]:
    """Step once for each token, which all scheduled requests get; returns all outputs."""
    for token_id in token_ids:
        step = driver.schedule()
        sampled = {s.request.request_id: SampledToken(token_id) for s in step.requests}
        driver.update(step, StepResult(sampled=sampled))
        driver.now += 1.0
    return driver.outputs


def end_of(request: Request, token_ids: list[int]) -> tuple[int, FinishReason | None]:
    """After how many of the tokens the request ended, and why."""
    driver = Driver(max_model_len=100)
    driver.add(request)
    outputs = answer_with(driver, token_ids)
    return len(outputs), outputs[-1].finish_reason


def test_an_end_token_stops() -> None:
    request = make_request("a", 5, eos_token_ids=(EOS, 99))
    assert end_of(request, [10, 11, EOS, 12]) == (3, FinishReason.STOP)


def test_ignore_eos_runs_to_max_tokens() -> None:
    request = make_request("a", 5, max_tokens=50, eos_token_ids=(EOS,), ignore_eos=True)
    assert end_of(request, [EOS] * 60) == (50, FinishReason.LENGTH)


def test_ignore_eos_does_not_ignore_stop_token_ids() -> None:
    request = make_request("a", 5, eos_token_ids=(EOS,), ignore_eos=True, stop_token_ids=(7,))
    assert end_of(request, [EOS, 7, 10]) == (2, FinishReason.STOP)


def test_a_stop_token_on_the_last_permitted_place_is_a_stop() -> None:
    request = make_request("a", 5, max_tokens=3, stop_token_ids=(7,))
    assert end_of(request, [10, 11, 7]) == (3, FinishReason.STOP)


def test_a_stop_token_after_max_tokens_comes_too_late() -> None:
    request = make_request("a", 5, max_tokens=2, stop_token_ids=(7,))
    assert end_of(request, [10, 11, 7]) == (2, FinishReason.LENGTH)


def test_the_context_ends_a_request_without_a_limit_of_its_own() -> None:
    request = make_request("a", 90, max_tokens=10_000, ignore_eos=True)
    assert end_of(request, [10] * 20) == (10, FinishReason.LENGTH)


@pytest.mark.parametrize("min_tokens", [1, 3])
def test_the_first_min_tokens_never_stop(min_tokens: int) -> None:
    request = make_request("a", 5, eos_token_ids=(EOS,), min_tokens=min_tokens)
    assert end_of(request, [EOS] * 9) == (min_tokens + 1, FinishReason.STOP)


def test_the_stop_token_is_reported_and_counted() -> None:
    driver = Driver()
    driver.add(make_request("a", 5, stop_token_ids=(7,)))
    last = answer_with(driver, [10, 7])[-1]
    assert last.new_token_ids == [7]
    assert last.stop_token_id == 7
    assert driver.tokens_of("a") == [10, 7]


def test_the_last_output_has_the_times_of_the_request() -> None:
    driver = Driver(now=5.0)
    driver.add(make_request("a", 5, max_tokens=3, arrival_time=4.0))
    times = answer_with(driver, [10, 10, 10])[-1].times
    assert times is not None
    assert (times.arrival, times.first_scheduled, times.first_token, times.finished) == (4, 5, 5, 7)


def execute(driver: Driver, **result: object) -> tuple[ScheduledStep, list[RequestOutput]]:
    step = driver.scheduler.schedule(driver.now)
    step_result = driver.executor.execute(step)
    for name, value in result.items():
        setattr(step_result, name, value)
    return step, driver.scheduler.update(step, step_result, driver.now)


def test_an_error_ends_its_request_alone() -> None:
    driver = Driver()
    driver.add(make_request("a", 5, max_tokens=2), make_request("b", 5, max_tokens=2))
    _, outputs = execute(driver, errors={"a": "not finite"})
    by_id = {output.request_id: output for output in outputs}
    assert by_id["a"].finish_reason is FinishReason.ERROR
    assert by_id["a"].error == "not finite"
    assert by_id["a"].new_token_ids == []
    driver.run()
    assert driver.reason_of("b") is FinishReason.LENGTH


def test_a_missing_token_is_an_error_of_that_request() -> None:
    driver = Driver()
    driver.add(make_request("a", 5))
    _, (output,) = execute(driver, sampled={})
    assert output.error == "the executor returned no token"
    assert driver.kv_cache.num_used_blocks == 0


def test_an_aborted_request_frees_its_blocks_and_its_late_result_is_dropped() -> None:
    driver = Driver()
    driver.add(make_request("a", 5))
    step = driver.scheduler.schedule(driver.now)
    output = driver.scheduler.abort("a", driver.now)
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    assert driver.kv_cache.num_used_blocks == 0
    assert driver.scheduler.update(step, driver.executor.execute(step), driver.now) == []
    assert driver.scheduler.abort("a", driver.now) is None


def test_a_request_aborted_while_it_waits_never_runs() -> None:
    driver = Driver(settings={"max_num_seqs": 1})
    driver.add(make_request("a", 5, max_tokens=3), make_request("b", 5))
    driver.step()
    driver.abort("b")
    driver.run()
    assert all(s.request.request_id == "a" for step in driver.executor.steps for s in step.requests)


def test_the_executor_is_told_who_has_finished_with_the_next_step() -> None:
    driver = Driver(settings={"max_num_seqs": 1})
    driver.add(make_request("a", 5, max_tokens=1), make_request("b", 5, max_tokens=1))
    driver.run()
    assert driver.scheduler.schedule(driver.now).finished_request_ids == []  # not executed
    driver.add(make_request("c", 5, max_tokens=1))
    driver.run()
    assert [step.finished_request_ids for step in driver.executor.steps] == [[], ["a"], ["b"]]
