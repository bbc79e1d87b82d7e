"""What a benchmark asks: the lengths of prompts and answers, and the prompts themselves."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.bench.workloads.lengths import (
    ExponentialLengths,
    LengthFlag,
    LengthRange,
    WorkloadError,
)
from shoal.bench.workloads.prompts import FilePrompts, Prompt, RandomPrompts, Vocabulary
from shoal.bench.workloads.recorded_load import RequestShape, Stretch, read_trace
from shoal.model.tokenizer import Tokenizer

__all__ = [
    "ComparedWorkload",
    "ExponentialLengths",
    "LengthRange",
    "RequestShape",
    "TrialWorkload",
    "Workload",
    "WorkloadError",
    "WorkloadRequest",
    "draw_shapes",
    "generate_requests",
    "ordinary_token_ids",
]

DEFAULT_INPUT_LEN = LengthRange(50, 800)
DEFAULT_OUTPUT_LEN = LengthRange(20, 200)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests with drawn lengths, or those of a trace, or the prompts of a file.

    Raises:
        WorkloadError: a value is outside its range, or two settings contradict each other.
    """

    num_requests: int = 96
    """How many requests; of a trace at most what its stretch holds."""

    input_len: LengthFlag | None = None
    """Tokens of a prompt: LOW:HIGH, one number, or exp:MEAN:CAP; 50:800 when not set."""

    output_len: LengthFlag | None = None
    """Tokens of an answer, likewise; it always gets as many. 20:200 when not set."""

    shared_prefix_len: int = 0
    """Tokens with which all prompts begin, in addition to their own; for prefix caching."""

    trace: Path | None = None
    """CSV or JSONL file of a real service's requests, whose lengths and arrivals are replayed."""

    trace_start: float = 0.0
    """Where in the trace to begin, in seconds after its first request."""

    trace_duration: float | None = None
    """How many seconds of the trace to take; all when not set."""

    trace_max_input: int | None = None
    """Longer prompts of the trace are cut to so many tokens."""

    trace_max_output: int | None = None
    """Longer answers of the trace are cut to so many tokens."""

    dataset: Path | None = None
    """JSONL file of prompts (fields prompt, question, text or turns); .gz is read too."""

    seed: Annotated[int, Parameter(name="--workload-seed")] = 0
    """Another seed gives other lengths, other prompts and other times of arrival."""

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_sources()
        if self.trace is None:
            object.__setattr__(self, "output_len", self.output_len or DEFAULT_OUTPUT_LEN)
            if self.dataset is None:
                object.__setattr__(self, "input_len", self.input_len or DEFAULT_INPUT_LEN)

    def _check_ranges(self) -> None:
        if self.num_requests < 1:
            raise WorkloadError(f"num_requests must be at least 1, got {self.num_requests}")
        for name in ("shared_prefix_len", "trace_start"):
            if not 0 <= (value := getattr(self, name)) < float("inf"):
                raise WorkloadError(f"{name} must be 0 or more, got {value}")
        if self.trace_duration is not None and not self.trace_duration > 0:
            raise WorkloadError(f"trace_duration must be above 0, got {self.trace_duration}")
        for name in ("trace_max_input", "trace_max_output"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise WorkloadError(f"{name} must be at least 1, got {value}")

    def _check_sources(self) -> None:
        if self.trace is None:
            defaults = {"trace_start": 0.0, "trace_duration": None}
            defaults |= {"trace_max_input": None, "trace_max_output": None}
            for name, default in defaults.items():
                if getattr(self, name) != default:
                    raise WorkloadError(f"{name} needs trace: it chooses from a trace's rows")
        elif self.input_len is not None or self.output_len is not None:
            raise WorkloadError("input_len and output_len contradict trace, which has its own")
        elif self.dataset is not None:
            raise WorkloadError("trace contradicts dataset: each brings prompts of its own length")
        if self.dataset is not None and self.input_len is not None:
            raise WorkloadError("input_len contradicts dataset, whose prompts have their lengths")


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedWorkload(Workload):
    """The workload of one run: each strategy has several."""

    num_requests: int = 24
    """How many requests; of a trace at most what its stretch holds."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWorkload(Workload):
    """The workload of one trial: many trials have to fit the budget."""

    num_requests: int = 48
    """How many requests a trial has; of a trace at most what its stretch holds."""


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request: its prompt, the exact number of tokens to generate, and when it arrives.

    `arrival`, in seconds, and `cut`, whether a length was cut, come from a trace alone.
    """

    prompt: Prompt
    max_tokens: int
    arrival: float | None = None
    cut: bool = False

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt of a workload that is made of token ids.

        Raises:
            WorkloadError: the prompt is text.
        """
        if isinstance(self.prompt, str):
            raise WorkloadError("the prompts of this workload are text, not token ids")
        return self.prompt


def ordinary_token_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids of all tokens that are text: prompts are made of these."""
    return [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]


def draw_shapes(workload: Workload) -> list[RequestShape]:
    """The lengths and arrivals of a workload; they depend on its settings and seed alone.

    The `num_input` of a dataset's request is 0: its prompt has the length that it has.

    Raises:
        WorkloadError: the trace can't be understood, or has no request in the stretch.
        OSError: the trace can't be read.
    """
    if workload.trace is not None:
        return _trace_shapes(workload, workload.trace)
    rng = random.Random(f"lengths {workload.seed}")
    shapes = []
    for _ in range(workload.num_requests):
        num_input = workload.input_len.draw(rng) if workload.input_len is not None else 0
        num_output = (workload.output_len or DEFAULT_OUTPUT_LEN).draw(rng)
        shapes.append(RequestShape(num_input, num_output))
    return shapes


def _trace_shapes(workload: Workload, path: Path) -> list[RequestShape]:
    shapes = read_trace(path)
    if shapes[0].arrival is not None:
        shapes = Stretch(workload.trace_start, workload.trace_duration).of(shapes)
    elif workload.trace_start or workload.trace_duration is not None:
        raise WorkloadError(f"{path} tells no arrivals: trace_start and trace_duration need them")
    if not shapes:
        raise WorkloadError(
            f"{path} has no request in the {workload.trace_duration or 'remaining'} seconds "
            f"after {workload.trace_start}"
        )
    max_input = workload.trace_max_input or sys.maxsize
    max_output = workload.trace_max_output or sys.maxsize
    return [shape.cut_to(max_input, max_output) for shape in shapes[: workload.num_requests]]


def generate_requests(
    workload: Workload, vocabulary: Vocabulary, salt: str = ""
) -> list[WorkloadRequest]:
    """The requests of a workload; prompts are random picks from `vocabulary`, or a dataset's.

    The lengths depend on the workload alone, so that every model gets the same lengths. Prompts
    of different seeds or salts share nothing but chance, so that a prefix cache can't answer one
    from the other; the same seed and salt give the same prompts.

    Args:
        workload: what is asked.
        vocabulary: token ids for prompts of token ids, words for prompts of text.
        salt: what makes this run's prompts new to a server that has seen the seed before.

    Raises:
        WorkloadError: `vocabulary` is empty, or the trace or the dataset can't be understood.
        OSError: the trace or the dataset can't be read.
    """
    shapes = draw_shapes(workload)
    prefix_len = workload.shared_prefix_len
    if workload.dataset is None:
        prompts = RandomPrompts(vocabulary, workload.seed, salt, prefix_len)
        return [
            WorkloadRequest(prompts.make(shape), shape.num_output, shape.arrival, shape.cut)
            for shape in shapes
        ]
    texts = FilePrompts(workload.dataset, workload.seed, salt, prefix_len)
    return [WorkloadRequest(texts.make(), shape.num_output) for shape in shapes]
