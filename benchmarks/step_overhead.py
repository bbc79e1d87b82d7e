"""What a step costs beside the native call, while requests decode.

    python benchmarks/step_overhead.py [--requests 1 32 256] [--steps N] [--json FILE]

Each number of requests gets an engine of its own. Once all prompts are computed, the parts of
`--steps` steps are timed; the table has medians in microseconds. "message" is what the engine's
process does with a step's outputs: it packs them for the server. The garbage collector runs as it
does in the engine's process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from shoal.bench.results.machine import Machine
from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.messages import Advanced
from shoal.executor.native import NativeExecutor
from shoal.model.loader import ModelFile, open_model
from shoal.model.registry import resolve
from shoal.request import Request, SamplingParams
from shoal.scheduler import create_scheduler

PROMPT_TOKENS = 100
WARM_UP_STEPS = 10
KV_TOKENS_OF_REQUEST = 512
PARTS = ("scheduling", "input preparation", "output processing", "message")


@dataclass(slots=True)
class Stopwatch:
    """Adds up the seconds that watched calls take."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, watched under `name`."""

        def watched(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = function(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
            return result

        return watched

    def take(self) -> dict[str, float]:
        """The seconds since the last time."""
        taken, self.seconds = self.seconds, {}
        return taken


class Watched:
    """Another object, of which some methods are replaced; these are found like any others."""

    def __init__(self, watched: Any, **methods: Callable[..., Any]) -> None:
        self._watched = watched
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)


def watched_engine(model: ModelFile, num_requests: int, watch: Stopwatch) -> EngineCore:
    """An engine whose schedule(), execute() and native call are watched."""
    config = EngineConfig(max_num_seqs=num_requests).for_serving()
    max_model_len = PROMPT_TOKENS + KV_TOKENS_OF_REQUEST
    executor = NativeExecutor(
        model.record_program(max_model_len),
        kv_cache_bytes=num_requests * (max_model_len + 16) * kv_bytes_of_token(model),
        num_valid_tokens=model.num_tokens,
    )
    session = executor._session  # its call is what everything else is compared with
    executor._session = Watched(session, execute=watch.timed("native", session.execute))
    scheduler = create_scheduler(config, executor.num_blocks, max_model_len)
    return EngineCore(
        Watched(scheduler, schedule=watch.timed("schedule", scheduler.schedule)),
        Watched(executor, execute=watch.timed("execute", executor.execute)),
    )


def kv_bytes_of_token(model: ModelFile) -> int:
    """Keys and values of 16 bits, the most they take, in all layers."""
    config = model.config
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def requests(count: int, max_tokens: int) -> list[Request]:
    """Different prompts, sampled greedily without an end."""
    return [
        Request(
            request_id=f"{index:032x}-0/0",
            prompt_token_ids=[
                1000 + (index + 37 * place) % 30000 for place in range(PROMPT_TOKENS)
            ],
            sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
            max_tokens=max_tokens,
            seed=0,
            arrival_time=time.monotonic(),
            cache_scope=("salt", ""),
        )
        for index in range(count)
    ]


def measure(model: ModelFile, num_requests: int, num_steps: int) -> list[dict[str, float]]:
    """Seconds of each part of each step, decoding `num_requests` requests."""
    watch = Stopwatch()
    core = watched_engine(model, num_requests, watch)
    encode = watch.timed("message", msgspec.msgpack.Encoder().encode)
    core.add(requests(num_requests, KV_TOKENS_OF_REQUEST))
    while len(core.step()) < num_requests:
        pass
    steps = []
    for index in range(WARM_UP_STEPS + num_steps):
        watch.take()
        start = time.perf_counter()
        outputs = core.step()
        seconds = time.perf_counter() - start
        encode(Advanced(core.stats(), outputs))
        if index >= WARM_UP_STEPS:
            steps.append(parts_of(watch.take(), seconds))
    core.close()
    return steps


def parts_of(seconds: dict[str, float], step_seconds: float) -> dict[str, float]:
    """What was watched as parts that add up to the step and its message."""
    return {
        "scheduling": seconds["schedule"],
        "input preparation": seconds["execute"] - seconds["native"],
        "native": seconds["native"],
        "output processing": step_seconds - seconds["schedule"] - seconds["execute"],
        "message": seconds["message"],
    }


def summary(steps: list[dict[str, float]]) -> dict[str, float]:
    """Medians in microseconds, and what is not native as a share of the whole."""
    medians = {
        name: 1e6 * statistics.median(step[name] for step in steps) for name in (*PARTS, "native")
    }
    python = sum(medians[name] for name in PARTS)
    return medians | {"all but native": python, "share": python / (python + medians["native"])}


def table(summaries: dict[int, dict[str, float]]) -> Table:
    columns = (*PARTS, "all but native", "native")
    result = Table("requests", *columns, "share", title="microseconds of a decode step")
    for num_requests, medians in summaries.items():
        cells = (f"{medians[name]:,.0f}" for name in columns)
        result.add_row(str(num_requests), *cells, f"{medians['share']:.2%}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step costs beside the native call.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = open_model(resolve(arguments.model))
    summaries = {
        num_requests: summary(measure(model, num_requests, arguments.steps))
        for num_requests in arguments.requests
    }
    console = Console(width=120)
    machine = Machine.this()
    console.print(machine.cpu)
    console.print(table(summaries))
    if arguments.json is not None:
        content = {"machine": asdict(machine), "microseconds": summaries}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
