"""GET /metrics: what is counted, and when; and the form that Prometheus' tools ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import exposition
import pytest
from fake_engine import FakeEngine, Script, Served, endless, eventually, queued, send_raw, stream

from shoal.engine.errors import RequestFailedError
from shoal.engine.outputs import CompletionDelta, RequestMetrics
from shoal.request import FinishReason, SamplingParams
from shoal.scheduler.interface import QueueFullError, RequestRejectedError, TimeLimitError
from shoal.server import record
from shoal.server.metrics import Metrics
from shoal.server.step_metrics import StepMetrics

COMPLETIONS = "/v1/completions"
REASONS = ("queue_full", "time_limit", "rejected", "invalid", "unavailable")


async def scrape(served: Served) -> str:
    return (await served.client.get("/metrics")).text


async def metric(served: Served, name: str, **labels: str) -> float:
    return exposition.value(await scrape(served), f"shoal:{name}", **labels)


async def complete(served: Served, **body: Any) -> Any:
    return await served.client.post(COMPLETIONS, json={"prompt": "a"} | body)


def raising(error: Exception) -> Script:
    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
        raise error
        yield  # makes it a generator

    return script


async def test_choices_and_tokens_are_counted(served: Served) -> None:
    usage = (await complete(served, n=2)).json()["usage"]
    assert await metric(served, "request_success_total", finished_reason="stop") == 2
    assert await metric(served, "prompt_tokens_total") == usage["prompt_tokens"]
    assert await metric(served, "generation_tokens_total") == usage["completion_tokens"]
    assert await metric(served, "time_to_first_token_seconds_count") == 2
    assert await metric(served, "e2e_request_latency_seconds_count") == 2
    assert await metric(served, "time_per_output_token_seconds_count") == 2
    gaps = await metric(served, "inter_token_latency_seconds_count")
    assert gaps == usage["completion_tokens"] - 2


def test_gaps_fall_into_the_buckets_of_any_other_latency() -> None:
    metrics = Metrics()
    for seconds in (0.0004, 0.001, 0.0011, 0.02, 3.0, 160.0, 500.0):
        metrics.next_tokens(seconds, 1)
        metrics.finished(FinishReason.LENGTH, seconds, seconds)
    text = metrics.exposition().decode()
    of_gaps, of_answers = (
        [
            (s.name.removeprefix(name), s.labels, s.value)
            for s in exposition.samples(text)
            if s.name.startswith(name)
        ]
        for name in ("shoal:inter_token_latency_seconds", "shoal:time_per_output_token_seconds")
    )
    assert of_gaps == of_answers
    assert ("_count", {}, 7.0) in of_gaps


async def test_tokens_count_as_they_come(served: Served, engine: FakeEngine) -> None:
    engine.script = endless
    writer = await send_raw(served, {"prompt": "a", "stream": True})
    await eventually(lambda: engine.num_running == 1)
    await asyncio.sleep(0.05)
    assert await metric(served, "prompt_tokens_total") == 1
    assert await metric(served, "generation_tokens_total") > 0
    assert await metric(served, "request_success_total", finished_reason="abort") == 0
    writer.transport.abort()


async def test_where_the_time_went_is_observed_once_a_choice(
    served: Served, engine: FakeEngine
) -> None:
    async def script(prompt: list[int], params: SamplingParams) -> AsyncIterator[CompletionDelta]:
        yield CompletionDelta(
            text="x",
            token_ids=[1],
            finish_reason=FinishReason.LENGTH,
            metrics=RequestMetrics(queue_time=1.0, prefill_time=2.0, decode_time=4.0, e2e_time=7.0),
        )

    engine.script = script
    await complete(served, prompt=["a", "b"])
    for name, seconds in (("queue", 1.0), ("prefill", 2.0), ("decode", 4.0)):
        assert await metric(served, f"request_{name}_time_seconds_count") == 2
        assert await metric(served, f"request_{name}_time_seconds_sum") == 2 * seconds


@pytest.mark.parametrize("script", [endless, queued])
async def test_an_abort_counts_and_its_latency_does_not(
    served: Served, engine: FakeEngine, script: Script
) -> None:
    engine.script = script
    writer = await send_raw(served, {"prompt": "a b c", "stream": True})
    await eventually(lambda: engine.num_running == 1)
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await eventually(served.state._idle.is_set)
    assert await metric(served, "request_success_total", finished_reason="abort") == 1
    assert await metric(served, "e2e_request_latency_seconds_count") == 0
    num_prompt_tokens = len(engine.requests[0][0])
    computed = await metric(served, "prompt_tokens_total")
    assert computed == (num_prompt_tokens if script is endless else 0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFullError("full", 3), "queue_full"),
        (TimeLimitError("late", 3), "time_limit"),
        (RequestRejectedError("long"), "rejected"),
    ],
)
async def test_what_the_engine_refuses_counts_by_its_reason_and_nowhere_else(
    served: Served, engine: FakeEngine, error: Exception, reason: str, streamed: bool
) -> None:
    engine.script = raising(error)
    await complete(served, stream=streamed)
    for name in REASONS:
        assert await metric(served, "requests_refused_total", reason=name) == (name == reason)
    assert await metric(served, "prompt_tokens_total") == 0
    for ended in FinishReason:
        assert await metric(served, "request_success_total", finished_reason=str(ended)) == 0


async def test_what_the_server_refuses_counts_by_its_reason(
    served: Served, engine: FakeEngine
) -> None:
    for body in ({"prompt": 1.5}, {"n": 0}, {"model": "nope"}, {"priority": 1001}):
        await complete(served, **body)
    assert await metric(served, "requests_refused_total", reason="invalid") == 4
    await served.client.post("/tokenize", json={"prompt": 1.5})  # nothing was to be generated
    assert await metric(served, "requests_refused_total", reason="invalid") == 4

    engine.is_ready = False
    await complete(served)
    assert await metric(served, "requests_refused_total", reason="unavailable") == 1


async def test_a_failure_is_no_refusal(served: Served, engine: FakeEngine) -> None:
    engine.script = raising(RequestFailedError("step failed"))
    await complete(served)
    assert await metric(served, "request_success_total", finished_reason="error") == 1
    for name in REASONS:
        assert await metric(served, "requests_refused_total", reason=name) == 0


async def test_the_schedulers_snapshot_is_shown(served: Served, engine: FakeEngine) -> None:
    engine.report(
        num_requests_running=3,
        num_requests_waiting=2,
        num_blocks_used=2,
        num_blocks_cached=5,
        num_preemptions=5,
        prefix_cache_queries=40,
        prefix_cache_hits=32,
        num_slots=10,
        num_useful_slots=7,
    )
    text = await scrape(served)
    for name, expected in (
        ("num_requests_running", 3),
        ("num_requests_waiting", 2),
        ("kv_cache_usage_ratio", 0.25),
        ("num_preemptions_total", 5),
        ("prefix_cache_queries_total", 40),
        ("prefix_cache_hits_total", 32),
        ("batch_slots_total", 10),
        ("batch_slots_useful_total", 7),
    ):
        assert exposition.value(text, f"shoal:{name}") == expected
    for state, num_blocks in (("used", 2), ("cached", 5), ("empty", 1)):
        assert exposition.value(text, "shoal:num_blocks", state=state) == num_blocks


async def test_every_step_is_observed_with_its_tokens(served: Served, engine: FakeEngine) -> None:
    engine.report()
    engine.report(num_steps=1, num_scheduled_tokens=512)
    engine.report(num_steps=1, num_scheduled_tokens=512)  # a turn without a step
    engine.report(num_steps=2, num_scheduled_tokens=515)
    assert await metric(served, "iteration_tokens_count") == 2
    assert await metric(served, "iteration_tokens_sum") == 515
    assert await metric(served, "iteration_tokens_bucket", le="4.0") == 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def utilization(metrics: StepMetrics) -> float:
    (family,) = [m for m in metrics.collect() if m.name == "shoal:batch_slot_utilization_ratio"]
    return float(family.samples[0].value)


def test_slot_utilisation_is_that_of_the_last_minute_and_0_when_idle(engine: FakeEngine) -> None:
    clock = Clock()
    metrics = StepMetrics(clock)
    engine.watch_stats(metrics.observe)
    num_slots = num_useful = 0
    engine.report()
    assert utilization(metrics) == 0

    def run(seconds: int, useful_of_four: int) -> None:
        nonlocal num_slots, num_useful
        for _ in range(seconds * 4):
            clock.now += 0.25
            num_slots += 4
            num_useful += useful_of_four
            engine.report(num_requests_running=4, num_slots=num_slots, num_useful_slots=num_useful)

    run(100, 1)
    assert utilization(metrics) == 0.25
    run(30, 3)
    assert utilization(metrics) == pytest.approx(0.5, abs=0.01)
    run(30, 3)
    assert utilization(metrics) == pytest.approx(0.75, abs=0.01)

    engine.report(num_slots=num_slots, num_useful_slots=num_useful)
    assert utilization(metrics) == 0
    clock.now += 600
    run(1, 2)  # what was before the pause is forgotten
    assert utilization(metrics) == 0.5


async def test_the_gauges_are_0_at_idle(served: Served, engine: FakeEngine) -> None:
    engine.report(num_requests_running=3, num_blocks_used=3, num_slots=3, num_useful_slots=3)
    engine.report(num_slots=3, num_useful_slots=3)
    text = await scrape(served)
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_ratio",
        "batch_slot_utilization_ratio",
    ):
        assert exposition.value(text, f"shoal:{name}") == 0


async def test_the_exposition_is_as_prometheus_wants_it(served: Served, engine: FakeEngine) -> None:
    for step in range(3):
        engine.report(num_steps=step, num_scheduled_tokens=step * 7)
    await complete(served)
    await complete(served, n=0)
    response = await served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert exposition.problems(response.text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# TYPE shoal:x gauge\nshoal:x 1\n", "no HELP"),
        ("# HELP shoal:x\n# TYPE shoal:x gauge\nshoal:x 1\n", "no HELP"),
        ("# HELP shoal:x_ms X.\n# TYPE shoal:x_ms gauge\nshoal:x_ms 1\n", "base unit"),
        ("# HELP shoal:x_time X.\n# TYPE shoal:x_time gauge\nshoal:x_time 1\n", "unit"),
        ("# HELP shoal:aB X.\n# TYPE shoal:aB gauge\nshoal:aB 1\n", "snake case"),
        ("# HELP shoal:x_sum X.\n# TYPE shoal:x_sum gauge\nshoal:x_sum 1\n", "reserved"),
        ("# HELP shoal:x X.\n# TYPE shoal:x gauge\nshoal:x 1\nshoal:x 2\n", "2 times"),
        ("# HELP shoal:x_total X.\n# TYPE shoal:x_total counter\nshoal:x_total -1\n", "counts"),
    ],
)
def test_the_check_of_the_exposition_finds_what_is_wrong(text: str, problem: str) -> None:
    assert any(problem in found for found in exposition.problems(text))


async def test_a_fault_of_the_log_record_fails_no_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("record")

    monkeypatch.setattr(record, "_between", broken)
    answer = await complete(served, prompt="a")
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "stop"


async def test_a_fault_of_the_metrics_fails_no_request(
    served: Served, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("metrics")

    recorders = [
        *(
            name
            for name in vars(served.state.metrics)
            if name.startswith("_") and name != "_registry"
        )
    ]
    for metric in [getattr(served.state.metrics, name) for name in recorders] + [
        served.state.metrics.steps._step_tokens
    ]:
        for method in ("observe", "labels", "inc"):
            monkeypatch.setattr(metric, method, broken, raising=False)
    engine.report()
    engine.report(num_steps=1)
    *chunks, done = await stream(served, COMPLETIONS, prompt="a")
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert (await complete(served, n=0)).status_code == 400
