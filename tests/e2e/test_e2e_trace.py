"""The step trace of the real server tells of every request how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from server_process import POISON, ServerProcess, faults, running, until
from streams import COMPLETIONS, Stream, post_and_leave_open

pytestmark = pytest.mark.e2e

ENDLESS = {"prompt": [5], "max_tokens": 30_000, "ignore_eos": True}


def ends_in(path: Path) -> list[tuple[str, str | None]]:
    """The phase that each request reached and why it ended, in the order of their ends."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    last_phase: dict[str, str] = {}
    ends = []
    for event in events:
        if (event.get("cat"), event["ph"]) != ("request", "e"):
            continue
        if event["name"] == "request":
            ends.append((last_phase[event["id"]], event["args"]["finish_reason"]))
        else:
            last_phase[event["id"]] = event["name"]
    return ends


def names_in(path: Path) -> list[str]:
    """What the clients called their requests, in the order of the requests' ends."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return [
        event["args"]["client_request_id"]
        for event in events
        if (event["name"], event["ph"]) == ("request", "b")
    ]


def logged_ids(server: ServerProcess) -> set[str]:
    """The ids of the requests in the access log."""
    lines = [line.partition(" shoal.access: ")[2] for line in server.stderr.splitlines()]
    return {json.loads(line)["request_id"] for line in lines if line}


def test_every_request_has_its_track_to_its_end(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    arguments = (str(tiny_model), "--max-num-seqs", "1", "--trace-file", str(path))
    with (
        running(tmp_path, *arguments, env=faults(poison=POISON)) as server,
        server.client() as client,
    ):
        until(server.is_idle)

        def complete(**body: Any) -> dict[str, Any]:
            answer: dict[str, Any] = client.post(COMPLETIONS, json=body).json()
            return answer

        # The first answer tells a text that the second can stop at.
        greedy = {**ENDLESS, "temperature": 0}
        text = complete(**{**greedy, "max_tokens": 8})["choices"][0]["text"]
        headers = {"X-Request-Id": "mine"}
        client.post(COMPLETIONS, json={**greedy, "max_tokens": 1, "n": 2}, headers=headers)
        stopped = complete(**greedy, stop=[text[:1]])
        assert stopped["choices"][0]["finish_reason"] == "stop"
        complete(prompt=[5, POISON])
        stream = Stream(server.url, {**ENDLESS, "max_total_time": 2.0})
        complete(prompt=[5], max_queue_time=0.2)
        with post_and_leave_open(server, ENDLESS):
            until(lambda: server.metrics()["num_requests_waiting"] == 1)
        until(lambda: server.metrics()["num_requests_waiting"] == 0)
        stream.join()
        with post_and_leave_open(server, {**ENDLESS, "stream": True}):
            until(lambda: server.metrics()["num_requests_running"] == 1)
        until(server.is_idle)
    assert names_in(path).count("mine") == 2
    assert set(names_in(path)) <= logged_ids(server)
    assert ends_in(path) == [
        ("decode", "length"),
        ("decode", "length"),
        ("decode", "length"),
        ("decode", "stop"),
        ("prefill", "error"),
        ("queue", "error"),  # too long in the queue
        ("queue", "abort"),  # hung up there
        ("decode", "length"),  # too long under way
        ("decode", "abort"),
    ]
