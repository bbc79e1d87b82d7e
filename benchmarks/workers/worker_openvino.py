"""Runs jobs on OpenVINO GenAI's continuous batching pipeline (see protocol.py)."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import openvino
import openvino_genai
from protocol import Engine, Job, Measurement, Timeline, serve


def greedy(max_tokens: int) -> openvino_genai.GenerationConfig:
    """Exactly `max_tokens` tokens, the likeliest each time."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = max_tokens
    config.min_new_tokens = max_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


class Runner:
    """Runs jobs on one loaded pipeline."""

    def __init__(self, pipeline: openvino_genai.ContinuousBatchingPipeline) -> None:
        self._pipeline = pipeline
        self._next_id = 0

    def __call__(self, job: Job) -> Measurement:
        """Hand over all requests and step until all are done."""
        tensors = [openvino.Tensor(np.array([ids], dtype=np.int64)) for ids in job.prompts]
        timeline = Timeline(len(tensors))
        handles = {}
        for row, (tensor, max_tokens) in enumerate(zip(tensors, job.max_tokens, strict=True)):
            handles[row] = self._pipeline.add_request(self._next_id, tensor, greedy(max_tokens))
            self._next_id += 1
        counts = [0] * len(tensors)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            ready = [row for row, handle in handles.items() if handle.can_read()]
            new = [
                len(output.generated_ids)
                for row in ready
                for output in handles[row].read().values()
            ]
            timeline.record(ready, new)
            for row, count in zip(ready, new, strict=True):
                counts[row] += count
                if counts[row] >= job.max_tokens[row]:
                    del handles[row]
        return timeline.measurement(job)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs jobs on OpenVINO GenAI.")
    parser.add_argument("model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--property", action="append", default=[], metavar="NAME=VALUE")
    arguments = parser.parse_args()
    properties = dict(item.split("=", 1) for item in arguments.property)

    def load() -> tuple[Engine, Callable[[Job], Measurement]]:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = arguments.max_num_seqs
        scheduler.max_num_batched_tokens = arguments.max_num_batched_tokens
        scheduler.cache_size = arguments.cache_gib
        scheduler.enable_prefix_caching = False
        start = time.perf_counter()
        pipeline = openvino_genai.ContinuousBatchingPipeline(
            arguments.model,
            scheduler,
            "CPU",
            {"INFERENCE_NUM_THREADS": arguments.threads, **properties},
        )
        engine = Engine(
            name="openvino",
            version=version("openvino-genai"),
            weights=arguments.weights,
            settings={
                "max_num_batched_tokens": str(arguments.max_num_batched_tokens),
                "threads": str(arguments.threads),
                **properties,
            },
            load_seconds=time.perf_counter() - start,
        )
        return engine, Runner(pipeline)

    serve(load)


if __name__ == "__main__":
    main()
