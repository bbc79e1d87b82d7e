"""The dashboard's files and data over HTTP; a browser looks at it in tests/e2e."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time

import pytest
from fake_engine import FakeEngine, Served, endless, eventually, serving

from shoal.config import EngineConfig
from shoal.scheduler.interface import BatchView, RequestProgress
from shoal.server.dashboard import PAGE_PATHS, STATE_PATH

COMPLETIONS = "/v1/completions"


def progress(request_id: str, **changes: object) -> RequestProgress:
    """A request that has its prompt of 40 tokens and five tokens of its answer."""
    fields = {
        "arrival_time": time.monotonic() - 3,
        "priority": 0,
        "num_prompt_tokens": 40,
        "num_computed_tokens": 44,
        "num_output_tokens": 5,
        "num_preemptions": 0,
        "is_done": False,
    }
    return RequestProgress(request_id, **(fields | changes))


async def test_the_page_and_its_files_come_from_the_server_alone(served: Served) -> None:
    sizes = []
    for path in PAGE_PATHS:
        response = await served.client.get(path)
        assert response.status_code == 200
        assert response.headers["content-security-policy"].startswith("default-src 'self'")
        assert response.headers["x-content-type-options"] == "nosniff"
        addresses = re.findall(r"https?://[^\"' )]+", response.text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}
        assert "innerHTML" not in response.text
        sizes.append(len(response.content))
    assert sum(sizes) < 50_000
    page = (await served.client.get("/")).text
    for reference in re.findall(r'(?:src|href)="([^"]+)"', page):
        assert reference in PAGE_PATHS


async def test_every_script_that_a_script_imports_is_served(served: Served) -> None:
    for path in PAGE_PATHS:
        for name in re.findall(r'from "\./([^"]+)"', (await served.client.get(path)).text):
            assert f"/dashboard/{name}" in PAGE_PATHS


async def test_a_key_guards_the_data_and_the_page_is_told(engine: FakeEngine) -> None:
    async with serving(engine, api_key="geheim") as served:
        page = await served.client.get("/")
        assert 'data-api-key="required"' in page.text
        assert "geheim" not in page.text
        assert (await served.client.get(STATE_PATH)).status_code == 401
        key = {"authorization": "Bearer geheim"}
        assert (await served.client.get(STATE_PATH, headers=key)).status_code == 200
    assert engine.num_views == 1


async def test_without_a_key_the_page_asks_for_none(served: Served) -> None:
    assert 'data-api-key="none"' in (await served.client.get("/")).text


async def test_the_engine_is_asked_only_by_the_dashboard(
    served: Served, engine: FakeEngine
) -> None:
    await served.client.post(COMPLETIONS, json={"prompt": "a"})
    await served.client.get("/metrics")
    await served.client.get("/")
    assert engine.num_views == 0
    await served.client.get(STATE_PATH)
    assert engine.num_views == 1


@pytest.mark.parametrize(
    ("changes", "phase"),
    [
        ({"num_output_tokens": 0, "num_computed_tokens": 16}, "prefill"),
        ({"num_output_tokens": 0, "num_prompt_tokens": 1, "num_computed_tokens": 0}, "prefill"),
        ({}, "decode"),
        ({"num_computed_tokens": 16, "num_preemptions": 1}, "prefill"),
        ({"is_done": True}, "padding"),
    ],
)
async def test_a_row_tells_its_phase(
    served: Served, engine: FakeEngine, changes: dict[str, object], phase: str
) -> None:
    engine.batch = BatchView([progress("a-0/0", **changes)], [])
    (row,) = (await served.client.get(STATE_PATH)).json()["running"]
    assert row["phase"] == phase
    assert row["num_prompt_tokens_computed"] <= row["num_prompt_tokens"]
    assert row["age"] == pytest.approx(3, abs=1)


async def test_the_queue_is_counted_beyond_the_rows_shown(
    served: Served, engine: FakeEngine
) -> None:
    engine.report(num_requests_waiting=70)
    engine.batch = BatchView([], [progress("a-0/0", priority=-2, num_output_tokens=0)])
    state = (await served.client.get(STATE_PATH)).json()
    assert state["num_waiting"] == 70
    (row,) = state["waiting"]
    assert (row["phase"], row["priority"]) == ("waiting", -2)


async def test_a_row_bears_the_name_that_its_client_gave_it(
    served: Served, engine: FakeEngine
) -> None:
    engine.script = endless
    headers = {"x-request-id": "mine"}
    body = {"prompt": "a", "stream": True}
    async with served.client.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
        await anext(response.aiter_lines())
        (inner,) = served.state._in_flight
        engine.batch = BatchView([progress(f"{inner}-0/0"), progress("gone-0/0")], [])
        rows = (await served.client.get(STATE_PATH)).json()["running"]
    assert [(row["request_id"], row["sample"]) for row in rows] == [("mine", ""), ("gone", "0/0")]


@pytest.mark.parametrize("body", [{"prompt": ["a", "b"]}, {"prompt": "a", "n": 2}])
async def test_each_of_several_choices_has_its_index_and_the_last_left_too(
    served: Served, engine: FakeEngine, body: dict[str, object]
) -> None:
    engine.script = endless
    stream = body | {"stream": True}
    async with served.client.stream("POST", COMPLETIONS, json=stream) as response:
        await anext(response.aiter_lines())
        (inner,) = served.state._in_flight
        for samples in (["0/0", "0/1"], ["0/0"], ["1/0"]):
            engine.batch = BatchView([progress(f"{inner}-{sample}") for sample in samples], [])
            rows = (await served.client.get(STATE_PATH)).json()["running"]
            assert [row["sample"] for row in rows] == samples


async def test_the_counters_are_those_of_the_metrics(served: Served, engine: FakeEngine) -> None:
    for _ in range(3):
        await served.client.post(COMPLETIONS, json={"prompt": "a"})
    await served.client.post(COMPLETIONS, json={"prompt": "a", "n": 0})
    engine.report(
        num_preemptions=5, num_blocks_used=2, num_blocks_cached=3, num_slots=8, num_useful_slots=6
    )
    await eventually(lambda: served.state.metrics.refused_by_reason()["invalid"] == 1)

    state = (await served.client.get(STATE_PATH)).json()

    assert state["finished"] == {"stop": 3, "length": 0, "abort": 0, "error": 0}
    assert sum(state["refused"].values()) == state["refused"]["invalid"] == 1
    assert state["num_preemptions"] == 5
    assert state["blocks"] == {"used": 2, "cached": 3, "free": 3}
    assert state["slot_utilization"] == 0.75
    assert state["ttft"]["count"] == state["tpot"]["count"] == 3
    assert 0 < state["ttft"]["p50"] <= state["ttft"]["p90"] <= state["ttft"]["p99"]


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (EngineConfig(), {"scheduler": "continuous", "max_num_batched_tokens": 512}),
        (EngineConfig(scheduler="static"), {"scheduler": "static", "max_queue_delay": 1.0}),
        (
            EngineConfig(scheduler="dynamic", max_queue_delay=2.5),
            {"scheduler": "dynamic", "max_num_batched_tokens": 16384, "max_queue_delay": 2.5},
        ),
    ],
)
async def test_the_strategy_is_told_with_its_limits(
    served: Served, engine: FakeEngine, config: EngineConfig, settings: dict[str, object]
) -> None:
    engine.config = config
    state = (await served.client.get(STATE_PATH)).json()
    common = {"max_num_seqs": 32, "max_model_len": 256, "max_waiting_requests": 1024}
    assert state["settings"] == settings | common
    assert (state["model"], state["chat"]) == ("fake", True)


async def test_while_nothing_can_be_told_the_reason_is(served: Served, engine: FakeEngine) -> None:
    for change, code in (
        ({"is_ready": False}, "model_loading"),
        ({"is_alive": False}, "engine_dead"),
    ):
        for name, value in change.items():
            setattr(engine, name, value)
        response = await served.client.get(STATE_PATH)
        assert response.status_code == 503
        assert response.json()["error"]["code"] == code
    assert (await served.client.get("/")).status_code == 200


async def test_a_fault_in_what_the_dashboard_remembers_fails_no_request(
    served: Served, engine: FakeEngine
) -> None:
    metrics = served.state.metrics
    for memory, attribute in ((metrics, "recent_ttft"), (metrics, "recent_tpot")):
        setattr(memory, attribute, None)
    vars(metrics.recent_steps)["_intervals"] = None
    engine.report()
    response = await served.client.post(COMPLETIONS, json={"prompt": "a"})
    assert response.status_code == 200


async def test_polling_is_no_news_in_the_log(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "shoal.access")
    await served.client.get(STATE_PATH)
    await eventually(lambda: bool(caplog.records))
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert json.loads(record.message)["path"] == STATE_PATH


async def test_a_page_that_is_closed_leaves_no_question_behind(
    served: Served, engine: FakeEngine
) -> None:
    asked = asyncio.Event()

    async def never() -> BatchView:
        asked.set()
        await asyncio.Event().wait()
        return BatchView([], [])

    engine.view_batch = never
    poll = asyncio.create_task(served.client.get(STATE_PATH))
    await asked.wait()
    poll.cancel()
    await eventually(served.state._idle.is_set)
