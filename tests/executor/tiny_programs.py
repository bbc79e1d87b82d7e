"""Tiny random programs, recorded by hand, and a driver that runs requests through an executor."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np
from gguf_files import quantize

from shoal._native import default_isa, kernels
from shoal.config import BLOCK_SIZE
from shoal.executor.native import NativeExecutor
from shoal.model.program import (
    Add,
    Attention,
    Embed,
    GatedActivation,
    Linear,
    Logits,
    Op,
    Program,
    RmsNorm,
    Rope,
    SelectRows,
    View,
)
from shoal.model.weights import WeightTensor, WeightType
from shoal.request import Request, SamplingParams, TokenLogprob
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep, StepResult


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a tiny model; the defaults are odd on purpose."""

    vocab_size: int = 101
    hidden: int = 36
    inner: int = 52
    num_layers: int = 2
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 16
    rotary_dim: int = 12
    interleaved: bool = True
    biases: bool = True
    window: int | None = None
    soft_cap: float | None = None
    max_model_len: int = 1024
    # Of the matrices of all layers, by their part of a layer; F32 where they are not named.
    types: dict[str, WeightType] = field(default_factory=dict)


# Types as files mix them. Where gates and what they gate have one type, they are one matrix.
_K_QUANTS = TinyShape(
    hidden=256,
    inner=256,
    num_heads=8,
    head_dim=32,
    rotary_dim=32,
    biases=False,
    types={
        "embedding": WeightType.Q6_K,
        "q": WeightType.Q4_K,
        "k": WeightType.Q4_K,
        "v": WeightType.Q6_K,
        "o": WeightType.Q5_K,
        "gate": WeightType.Q4_K,
        "up": WeightType.Q4_K,
        "down": WeightType.Q6_K,
    },
)
_BLOCKS_OF_32 = TinyShape(
    hidden=96,
    inner=352,
    biases=False,
    types={
        "q": WeightType.Q8_0,
        "k": WeightType.Q4_0,
        "v": WeightType.Q4_0,
        "o": WeightType.Q4_1,
        "gate": WeightType.Q4_0,
        "up": WeightType.Q4_0,
        "down": WeightType.Q8_0,
    },
)
_GATES_APART = TinyShape(
    hidden=96,
    inner=32,
    types={
        "embedding": WeightType.Q8_0,
        "o": WeightType.F16,
        "gate": WeightType.Q8_0,
        "up": WeightType.Q4_1,
        "down": WeightType.Q4_0,
    },
)
QUANTIZED_SHAPES = (_K_QUANTS, _BLOCKS_OF_32, _GATES_APART)


class _TinyRecorder:
    def __init__(self, shape: TinyShape, seed: int) -> None:
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        self.weights: dict[str, WeightTensor] = {}
        self.ops: list[Op] = []
        q_width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self._q = View("qkv", 0, q_width)
        self._k = View("qkv", q_width, kv_width)
        self._v = View("qkv", q_width + kv_width, kv_width)
        self.buffers = {
            "hidden": shape.hidden,
            "normed": shape.hidden,
            "qkv": q_width + 2 * kv_width,
            "attended": q_width,
            "gate_up": 2 * shape.inner,
            "activated": shape.inner,
            "delta": shape.hidden,
            "selected": shape.hidden,
        }

    def _weight(self, name: str, *shape: int) -> str:
        if name not in self.weights:
            values = self._rng.standard_normal(shape) / np.sqrt(shape[-1])
            values = (values + 1.0 if len(shape) == 1 else values).astype(np.float32)
            kind = self._shape.types.get(name.rpartition(".")[2], WeightType.F32)
            data = np.ascontiguousarray(quantize(values, kind)).reshape(-1).view(np.uint8)
            self.weights[name] = WeightTensor(name, shape, kind, data)
        return name

    def _view(self, buffer: str) -> View:
        return View(buffer, 0, self.buffers[buffer])

    def _linear(self, x: str, out: str, names: dict[str, int]) -> None:
        inputs = self.buffers[x]
        weights = tuple(self._weight(name, rows, inputs) for name, rows in names.items())
        biases = tuple(
            self._weight(f"{name}.bias", rows) if self._shape.biases else None
            for name, rows in names.items()
        )
        self.ops.append(Linear(self._view(x), self._view(out), weights, biases))

    def _norm(self, x: str, name: str) -> None:
        weight = self._weight(name, self.buffers[x])
        self.ops.append(RmsNorm(self._view(x), self._view("normed"), weight, 1e-5))

    def _layer(self, layer: int) -> None:
        shape = self._shape
        kv_width = self._k.width
        self._norm("hidden", f"{layer}.attn_norm")
        names = {f"{layer}.q": self._q.width, f"{layer}.k": kv_width, f"{layer}.v": kv_width}
        self._linear("normed", "qkv", names)
        for view, heads in ((self._q, shape.num_heads), (self._k, shape.num_kv_heads)):
            self.ops.append(Rope(view, heads, shape.head_dim, shape.rotary_dim, shape.interleaved))
        self.ops.append(
            Attention(
                q=self._q,
                k=self._k,
                v=self._v,
                out=self._view("attended"),
                layer=layer,
                num_heads=shape.num_heads,
                num_kv_heads=shape.num_kv_heads,
                head_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
                window=shape.window,
                soft_cap=shape.soft_cap,
            )
        )
        self._linear("attended", "delta", {f"{layer}.o": shape.hidden})
        self.ops.append(Add(self._view("hidden"), self._view("delta")))
        self._norm("hidden", f"{layer}.ffn_norm")
        self._linear(
            "normed", "gate_up", {f"{layer}.gate": shape.inner, f"{layer}.up": shape.inner}
        )
        gate, up = View("gate_up", 0, shape.inner), View("gate_up", shape.inner, shape.inner)
        self.ops.append(GatedActivation(gate, up, self._view("activated")))
        self._linear("activated", "delta", {f"{layer}.down": shape.hidden})
        self.ops.append(Add(self._view("hidden"), self._view("delta")))

    def record(self) -> None:
        table = self._weight("embedding", self._shape.vocab_size, self._shape.hidden)
        self.ops.append(Embed(self._view("hidden"), table))
        for layer in range(self._shape.num_layers):
            self._layer(layer)
        self.ops.append(SelectRows(self._view("hidden"), self._view("selected")))
        self._norm("selected", "output_norm")
        self.ops.append(Logits(self._view("normed"), table))


def tiny_program(shape: TinyShape | None = None, seed: int = 0) -> Program:
    shape = shape or TinyShape()
    recorder = _TinyRecorder(shape, seed)
    recorder.record()
    frequencies = 1000.0 ** -(np.arange(shape.rotary_dim // 2) * 2 / shape.rotary_dim)
    angles = np.arange(shape.max_model_len)[:, None] * frequencies
    return Program(
        ops=tuple(recorder.ops),
        buffers=recorder.buffers,
        weights=recorder.weights,
        vocab_size=shape.vocab_size,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_model_len=shape.max_model_len,
        rope_cos=np.cos(angles).astype(np.float32),
        rope_sin=np.sin(angles).astype(np.float32),
    )


def make_executor(
    program: Program, num_threads: int = 1, num_blocks: int = 200, isa: str | None = None
) -> NativeExecutor:
    block_bytes = kernels.kv_block_bytes(
        isa or default_isa(), program.num_layers, program.num_kv_heads, program.head_dim
    )
    return NativeExecutor(
        program,
        kv_cache_bytes=num_blocks * block_bytes,
        num_valid_tokens=program.vocab_size,
        num_threads=num_threads,
        isa=isa,
    )


def make_request(
    request_id: str, prompt: list[int], params: SamplingParams | None = None, seed: int = 0
) -> Request:
    params = params or SamplingParams(temperature=0)
    return Request(request_id, prompt, params, max_tokens=params.max_tokens or 8, seed=seed)


@dataclass
class Answer:
    """All that an executor said about a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    error: str | None = None


ChooseChunks = Callable[[list[tuple[Request, int]]], list[int]]


def all_at_once(waiting: list[tuple[Request, int]]) -> list[int]:
    """Every request computes all that it can, in every step."""
    return [left for _, left in waiting]


def random_chunks(seed: int) -> ChooseChunks:
    """In each step some requests compute a random part of what they can."""
    rng = random.Random(seed)

    def choose(waiting: list[tuple[Request, int]]) -> list[int]:
        chunks = [rng.choice([0, 1, left, rng.randint(1, left)]) for _, left in waiting]
        return chunks if any(chunks) else [1] * len(waiting)

    return choose


class Driver:
    """Runs requests to their end with blocks of its own; `choose` says who computes how much.

    With `preempt_every` a random request loses its blocks every so many steps and starts over.
    """

    def __init__(self, executor: NativeExecutor, choose: ChooseChunks, seed: int = 0) -> None:
        self._executor = executor
        self._choose = choose
        self._rng = random.Random(seed)
        self._free = list(range(executor.num_blocks))
        self._rng.shuffle(self._free)
        self._tables: dict[str, list[int]] = {}
        self._finished: list[str] = []

    def run(self, requests: list[Request], preempt_every: int = 0) -> dict[str, Answer]:
        answers = {request.request_id: Answer() for request in requests}
        running = list(requests)
        num_steps = 0
        while running:
            num_steps += 1
            if preempt_every and num_steps % preempt_every == 0:
                self._preempt(self._rng.choice(running))
            result = self._execute(running, num_steps)
            for request in list(running):
                self._take(request, result, answers[request.request_id])
                answer = answers[request.request_id]
                if answer.error or len(request.output_token_ids) == request.max_tokens:
                    running.remove(request)
                    self._preempt(request)
                    self._finished.append(request.request_id)
        self._executor.execute(ScheduledStep(num_steps + 1, finished_request_ids=self._finished))
        self._finished = []
        return answers

    def _execute(self, running: list[Request], step_id: int) -> StepResult:
        waiting = [
            (request, request.num_tokens - request.num_computed_tokens) for request in running
        ]
        step = ScheduledStep(step_id, finished_request_ids=self._finished)
        self._finished = []
        for (request, left), count in zip(waiting, self._choose(waiting), strict=True):
            if count:
                step.requests.append(self._schedule(request, count, sample=count == left))
        return self._executor.execute(step)

    def _schedule(self, request: Request, count: int, sample: bool) -> ScheduledRequest:
        start = request.num_computed_tokens
        table = self._tables.setdefault(request.request_id, [])
        while len(table) * BLOCK_SIZE < start + count:
            table.append(self._free.pop())
        request.num_computed_tokens += count
        token_ids = request.token_ids(start, start + count)
        return ScheduledRequest(request, token_ids, start, list(table), sample)

    def _take(self, request: Request, result: StepResult, answer: Answer) -> None:
        answer.error = result.errors.get(request.request_id)
        answer.prompt_logprobs += result.prompt_logprobs.get(request.request_id, [])
        sampled = result.sampled.get(request.request_id)
        if sampled is not None:
            request.output_token_ids.append(sampled.token_id)
            answer.token_ids.append(sampled.token_id)
            answer.logprobs.append(sampled.logprob)

    def _preempt(self, request: Request) -> None:
        self._free += self._tables.pop(request.request_id, [])
        self._rng.shuffle(self._free)
        request.num_computed_tokens = 0


def random_prompt(length: int, seed: int, vocab_size: int = 101) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, length).tolist()


def one_request_step(prompt: list[int], **changes: object) -> ScheduledStep:
    blocks = list(range(-(-len(prompt) // 16)))
    scheduled = ScheduledRequest(make_request("a", prompt), prompt, 0, blocks, sample=True)
    return ScheduledStep(1, [msgspec.structs.replace(scheduled, **changes)])
