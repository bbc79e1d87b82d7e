"""Where a request's time and tokens went: in its answer and in the access log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from fake_engine import FakeEngine, Served, eventually, queued, send_raw, stream

from shoal.engine.errors import RequestFailedError
from shoal.engine.outputs import CompletionDelta as Delta
from shoal.engine.outputs import RequestMetrics
from shoal.request import FinishReason, SamplingParams
from shoal.scheduler.interface import QueueFullError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
TIMELINE = {
    "queue_time": 0.25,
    "prefill_time": 0.5,
    "decode_time": 1.0,
    "ttft": 0.75,
    "e2e_time": 1.75,
    "num_preemptions": 1,
}


async def timed(prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
    """Two tokens a sample; each sample starts and ends a second after the one before."""
    for index in range(params.n):
        yield Delta(index=index, text="x", token_ids=[1], num_cached_tokens=16)
        yield Delta(
            index=index,
            text="y",
            token_ids=[2],
            num_cached_tokens=16,
            finish_reason=FinishReason.LENGTH,
            metrics=RequestMetrics(
                queue_time=0.25 + index,
                prefill_time=0.5,
                decode_time=1.0,
                ttft=0.75 + index,
                e2e_time=1.75 + index,
                num_preemptions=1,
            ),
        )


@pytest.fixture(autouse=True)
def _timed(engine: FakeEngine) -> None:
    engine.script = timed


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": MESSAGES})]
)
async def test_an_answer_says_where_its_time_went(
    served: Served, path: str, body: dict[str, Any]
) -> None:
    answer = (await served.client.post(path, json=body)).json()
    assert answer["metrics"] == TIMELINE

    options = {"stream_options": {"include_usage": True}}
    *chunks, last, _ = await stream(served, path, **body, **options)
    assert last["metrics"] == TIMELINE
    assert all("metrics" not in chunk for chunk in chunks)


async def test_the_times_of_several_choices_go_from_the_first_start_to_the_last_end(
    served: Served,
) -> None:
    answer = (await served.client.post(COMPLETIONS, json={"prompt": ["a", "b"], "n": 3})).json()
    assert answer["metrics"] == TIMELINE | {
        "decode_time": 3.0,
        "e2e_time": 3.75,
        "num_preemptions": 6,
    }


async def test_cached_tokens_are_those_of_all_prompts_each_once(served: Served) -> None:
    for prompt, num_cached in (("a", 16), (["a", "b"], 32)):
        response = await served.client.post(COMPLETIONS, json={"prompt": prompt, "n": 2})
        details = response.json()["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": num_cached}


async def test_the_access_log_has_a_line_a_request(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.access")
    await served.client.post(CHAT, json={"messages": MESSAGES}, headers={"x-request-id": "mine"})
    await eventually(lambda: len(caplog.records) == 1)
    line = json.loads(caplog.records[0].message)
    assert 0 < line.pop("time_to_first_token") < line.pop("duration") < 10
    assert line.pop("prompt_tokens") > 0
    assert line == {
        "request_id": "mine",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "completion_tokens": 2,
        "cached_tokens": 16,
        "finish_reasons": ["length"],
        "queue_time": 0.25,
        "prefill_time": 0.5,
        "decode_time": 1.0,
    }


async def test_the_access_log_names_the_error(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def full(prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
        raise QueueFullError("full", 1)
        yield

    caplog.set_level(logging.INFO, "shoal.access")
    engine.script = full
    await served.client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
    await served.client.post(COMPLETIONS, json={"prompt": 1.5})
    await eventually(lambda: len(caplog.records) == 2)
    lines = [json.loads(record.message) for record in caplog.records]
    assert [(line["status"], line["error"]) for line in lines] == [
        (429, "queue_full"),
        (400, "invalid_type"),
    ]


async def begun_then_held(prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
    """The first sample begins after half a second in the engine; nothing more comes."""
    yield Delta(
        text="x",
        token_ids=[1],
        num_cached_tokens=16,
        metrics=RequestMetrics(
            queue_time=0.25, prefill_time=0.5, decode_time=0.0, ttft=0.75, e2e_time=0.75
        ),
    )
    await asyncio.Event().wait()


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_line_of_a_client_that_left_has_the_times_so_far(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    caplog.set_level(logging.INFO, "shoal.access")
    engine.script = begun_then_held
    writer = await send_raw(served, {"prompt": "a", "n": 2, "stream": streamed})
    await eventually(lambda: engine.num_running == 1)
    await asyncio.sleep(0.1)
    writer.close()
    await eventually(lambda: len(caplog.records) == 1)
    line = json.loads(caplog.records[0].message)
    assert 0.1 <= line.pop("decode_time") < line.pop("duration") < 5
    assert line.pop("time_to_first_token") > 0
    del line["request_id"], line["prompt_tokens"]
    assert line == {
        "method": "POST",
        "path": COMPLETIONS,
        "status": 499,
        "completion_tokens": 1,
        "cached_tokens": 16,
        "finish_reasons": ["abort", "abort"],
        "queue_time": 0.25,
        "prefill_time": 0.5,
    }


async def test_the_line_of_an_answer_that_broke_off_has_the_times_so_far(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async def breaks(prompt: list[int], params: SamplingParams) -> AsyncIterator[Delta]:
        async with aclosing(begun_then_held(prompt, params)) as deltas:
            yield await anext(deltas)
        raise RequestFailedError("no luck")

    caplog.set_level(logging.INFO, "shoal.access")
    engine.script = breaks
    await stream(served, COMPLETIONS, prompt="a")
    await eventually(lambda: len(caplog.records) == 1)
    line = json.loads(caplog.records[0].message)
    assert (line["error"], line["finish_reasons"]) == ("request_failed", ["error"])
    assert (line["queue_time"], line["prefill_time"]) == (0.25, 0.5)


async def test_the_line_of_a_client_that_left_before_the_first_token_has_no_times(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shoal.access")
    engine.script = queued
    writer = await send_raw(served, {"prompt": "a"})
    await eventually(lambda: engine.num_running == 1)
    writer.close()
    await eventually(lambda: len(caplog.records) == 1)
    line = json.loads(caplog.records[0].message)
    assert (line["status"], line["finish_reasons"]) == (499, ["abort"])
    assert not any(name in line for name in ("queue_time", "prefill_time", "decode_time"))
