"""Runs jobs on Shoal's engine, in this process (see protocol.py): token ids in, token ids out."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from importlib.metadata import version

from protocol import Engine, Job, Measurement, Timeline, serve

from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.inputs import InputProcessor
from shoal.engine.loading import load_engine, load_text_interface, model_limits
from shoal.model.loader import open_model
from shoal.model.registry import resolve
from shoal.request import SamplingParams

DEFAULTS = EngineConfig()


class Runner:
    """Runs jobs on one loaded engine."""

    def __init__(self, engine: EngineCore, inputs: InputProcessor) -> None:
        self._engine = engine
        self._inputs = inputs
        self._ids = map(str, itertools.count())

    def __call__(self, job: Job) -> Measurement:
        """Hand over all requests and step until all are done.

        Raises:
            RuntimeError: a request failed.
        """
        timeline = Timeline(len(job.prompts))
        rows: dict[str, int] = {}
        now = time.monotonic()
        for row, (prompt, max_tokens) in enumerate(zip(job.prompts, job.max_tokens, strict=True)):
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
            requests = self._inputs.process(next(self._ids), prompt, params, arrival_time=now)
            rows[requests[0].request_id] = row
            self._engine.add(requests)
        while self._engine.has_work():
            outputs = self._engine.step()
            for output in outputs:
                if output.error is not None:
                    raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            timeline.record(
                [rows[output.request_id] for output in outputs],
                [len(output.new_token_ids) for output in outputs],
            )
        return timeline.measurement(job)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs jobs on Shoal.")
    parser.add_argument("model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=DEFAULTS.max_num_seqs)
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=DEFAULTS.max_num_batched_tokens
    )
    parser.add_argument("--instruction-set", default=DEFAULTS.instruction_set)
    arguments = parser.parse_args()

    def load() -> tuple[Engine, Callable[[Job], Measurement]]:
        start = time.perf_counter()
        config = EngineConfig(
            model=arguments.model,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=arguments.max_num_batched_tokens,
            num_threads=arguments.threads,
            instruction_set=arguments.instruction_set,
            enable_prefix_caching=False,  # a round must not answer from the one before
        )
        model = open_model(resolve(arguments.model))
        core, info = load_engine(config, model)
        inputs = InputProcessor(model_limits(info, load_text_interface(model)), config)
        settings = {
            "threads": str(info.num_threads),
            "isa": info.isa,
            "max_num_batched_tokens": str(config.token_budget),
        }
        engine = Engine(
            name="shoal",
            version=version("shoal"),
            weights=arguments.weights,
            settings=settings,
            load_seconds=time.perf_counter() - start,
        )
        return engine, Runner(core, inputs)

    serve(load)


if __name__ == "__main__":
    main()
