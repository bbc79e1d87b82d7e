"""The native executor: against the NumPy one, exact under batching, strict about its input."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_programs import (
    QUANTIZED_SHAPES,
    Answer,
    ChooseChunks,
    Driver,
    TinyShape,
    all_at_once,
    make_executor,
    make_request,
    one_request_step,
    random_chunks,
    random_prompt,
    tiny_program,
)

from shoal import _native
from shoal.executor.native import NativeExecutor
from shoal.executor.reference import ReferenceExecutor
from shoal.model.program import Add, Logits, Op, Program, RmsNorm, SelectRows, View
from shoal.model.weights import WeightTensor
from shoal.request import Request, SamplingParams
from shoal.scheduler.interface import ScheduledRequest, ScheduledStep

ISAS = _native.kernels.instruction_sets()

SHAPES = [
    TinyShape(),
    TinyShape(hidden=64, inner=96, head_dim=32, rotary_dim=32, interleaved=False, biases=False),
    TinyShape(num_heads=4, num_kv_heads=4, window=10),
    TinyShape(num_heads=5, num_kv_heads=1, head_dim=80, rotary_dim=80, soft_cap=2.0),
    TinyShape(num_layers=1, vocab_size=1000),
]
DENSE_AND_QUANTIZED = [TinyShape(), *QUANTIZED_SHAPES]


@pytest.fixture(scope="module")
def program() -> Program:
    return tiny_program()


def mixed_requests(count: int, seed: int = 0) -> list[Request]:
    """Requests of many lengths and sampling parameters; the same for the same seed."""
    rng = np.random.default_rng(seed)
    kinds = [
        SamplingParams(temperature=0, logprobs=2, max_tokens=6),
        SamplingParams(temperature=0.8, top_p=0.9, logprobs=0, max_tokens=9),
        SamplingParams(top_k=10, min_p=0.01, repetition_penalty=1.2, max_tokens=5),
        SamplingParams(frequency_penalty=0.5, presence_penalty=0.5, max_tokens=12),
        SamplingParams(prompt_logprobs=3, logprobs=3, max_tokens=3, logit_bias={4: 2.0}),
    ]
    return [
        make_request(
            f"r{i}",
            random_prompt(int(rng.integers(1, 60)), seed=int(rng.integers(2**31))),
            kinds[i % len(kinds)],
            seed=int(rng.integers(2**62)),
        )
        for i in range(count)
    ]


def answers_alone(program: Program, count: int, seed: int = 0) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    executor = make_executor(program)
    for request in mixed_requests(count, seed):
        answers |= Driver(executor, all_at_once).run([request])
    return answers


@pytest.mark.parametrize("shape", [*SHAPES, *QUANTIZED_SHAPES])
def test_logits_agree_with_the_numpy_executor(shape: TinyShape) -> None:
    program = tiny_program(shape, seed=1)
    prompt = random_prompt(70, seed=2, vocab_size=shape.vocab_size)
    step = one_request_step(prompt)
    want = ReferenceExecutor(program, 8, np.float64).logits(step, all_rows=True)["a"]
    executor = make_executor(program)
    got = executor.logits(step, all_rows=True)["a"]
    assert got.shape == want.shape
    # Keys and values are halves, 11 bits of precision, or integers of 8 bits, which activations are
    # too where weights are quantised.
    error = 1.6e-2 if executor.isa in ("avx512", "amx") else 2e-3
    error = 5e-2 if shape.types else error
    np.testing.assert_allclose(got, want, atol=error * np.abs(want).max())


@pytest.mark.parametrize("shape", DENSE_AND_QUANTIZED)
@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa not in ("avx512", "amx")])
def test_portable_code_and_avx2_give_the_same_bits(shape: TinyShape, isa: str) -> None:
    program = tiny_program(shape)
    step = one_request_step(random_prompt(50, seed=3))
    portable = make_executor(program, isa="portable").logits(step, all_rows=True)["a"]
    got = make_executor(program, isa=isa).logits(step, all_rows=True)["a"]
    np.testing.assert_array_equal(got.view(np.uint32), portable.view(np.uint32))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from(DENSE_AND_QUANTIZED),
    seed=st.integers(0, 10_000),
    num_threads=st.integers(1, 3),
    preempt_every=st.sampled_from([0, 3, 7]),
)
def test_batching_changes_no_bit(
    shape: TinyShape, seed: int, num_threads: int, preempt_every: int
) -> None:
    program = tiny_program(shape)
    executor = make_executor(program, num_threads=num_threads)
    driver = Driver(executor, random_chunks(seed), seed)
    together = driver.run(mixed_requests(10), preempt_every)
    for request_id, alone in answers_alone(program, 10).items():
        answer = together[request_id]
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == alone.logprobs
        if not preempt_every:  # a recomputation brings the prompt's again
            assert answer.prompt_logprobs == alone.prompt_logprobs


def shared_buffer(program: Program) -> Program:
    """The residual stream and what is added to it as two halves of one buffer."""
    width = program.buffers["hidden"]
    places = {"hidden": View("stream", 0, width), "delta": View("stream", width, width)}

    def moved(op: Op) -> Op:
        views = {name: getattr(op, name) for name in ("x", "y", "out") if hasattr(op, name)}
        changes: dict[str, Any] = {
            name: places[view.buffer] for name, view in views.items() if view.buffer in places
        }
        return replace(op, **changes)

    buffers = {**program.buffers, "stream": 2 * width}
    return replace(program, ops=tuple(moved(op) for op in program.ops), buffers=buffers)


def normed_before_selection(program: Program) -> Program:
    """The last norm of all rows, so that nothing but later layers reads the residual stream."""
    *ops, select, norm, logits = program.ops
    assert isinstance(select, SelectRows)
    assert isinstance(norm, RmsNorm)
    assert isinstance(logits, Logits)
    ops += [
        replace(norm, x=select.x),
        SelectRows(norm.out, select.out),
        replace(logits, x=select.out),
    ]
    return replace(program, ops=tuple(ops))


# From 8 rows a thread on, each takes 64 at most through the ops between two attentions.
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [15, 16, 65, 130, 200])
@pytest.mark.parametrize("change", [shared_buffer, normed_before_selection, None])
@pytest.mark.parametrize("shape", DENSE_AND_QUANTIZED)
def test_rows_that_threads_take_in_parts_are_those_of_short_steps(
    shape: TinyShape,
    change: Callable[[Program], Program] | None,
    num_tokens: int,
    num_threads: int,
) -> None:
    program = tiny_program(shape)
    program = normed_before_selection(program) if change is shared_buffer else program
    program = change(program) if change else program
    prompt = random_prompt(num_tokens, seed=4)
    params = SamplingParams(temperature=0, max_tokens=2, logprobs=3, prompt_logprobs=3)

    def answer(num_threads: int, chunks: ChooseChunks) -> Answer:
        executor = make_executor(program, num_threads)
        return Driver(executor, chunks).run([make_request("r", prompt, params)])["r"]

    assert answer(num_threads, all_at_once) == answer(
        1, lambda waiting: [min(7, n) for _, n in waiting]
    )


def test_prompt_logprobs_are_those_of_the_tokens_that_follow(program: Program) -> None:
    prompt = random_prompt(200, seed=4)  # more rows than one run of the tail takes
    request = make_request("a", prompt, SamplingParams(prompt_logprobs=2, max_tokens=1))
    answer = Driver(make_executor(program), all_at_once).run([request])["a"]
    logits = make_executor(program).logits(one_request_step(prompt), all_rows=True)["a"]
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    assert [entry.token_id for entry in answer.prompt_logprobs] == prompt[1:]
    for row, entry in zip(logprobs, answer.prompt_logprobs, strict=False):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=2e-6)
        assert [token for token, _ in entry.top] == np.argsort(-row, kind="stable")[:2].tolist()


def test_the_draw_belongs_to_the_position_of_the_token_in_its_sequence(program: Program) -> None:
    params = SamplingParams(temperature=2.0, max_tokens=4)
    settings = _native.SamplingSettings(
        seed=9,
        sample_index=0,
        temperature=2.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        min_tokens=0,
        end_token_ids=[],
        logit_bias=[],
    )
    request = make_request("a", [5, 6, 7], params, seed=9)
    got = Driver(make_executor(program), all_at_once).run([request])["a"].token_ids
    tokens = [5, 6, 7]
    for token in got:
        logits = make_executor(program).logits(one_request_step(tokens))["a"][0]
        none = array("i")
        row = _native.kernels.sample("portable", logits, settings, none, none, len(tokens), -1)
        assert token == row[1][0]
        tokens.append(token)


def test_samples_of_one_seed_differ_and_repeat(program: Program) -> None:
    def generate() -> list[list[int]]:
        params = SamplingParams(temperature=1.5, max_tokens=8)
        requests = [make_request(f"{i}", [1, 2, 3], params, seed=-5) for i in range(3)]
        for i, request in enumerate(requests):
            request.sample_index = i
        answers = Driver(make_executor(program), all_at_once).run(requests)
        return [answers[f"{i}"].token_ids for i in range(3)]

    first = generate()
    assert len({tuple(token_ids) for token_ids in first}) == 3
    assert generate() == first


def test_end_tokens_are_banned_until_min_tokens(program: Program) -> None:
    prompt = random_prompt(5, seed=6)
    greedy = Driver(make_executor(program), all_at_once).run([make_request("a", prompt)])
    first = greedy["a"].token_ids[0]
    for stop, eos in [((first,), ()), ((), (first,)), ((first, 10**9), ())]:
        params = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=stop, max_tokens=1)
        request = make_request("b", prompt, params)
        request.eos_token_ids = eos
        answer = Driver(make_executor(program), all_at_once).run([request])["b"]
        assert answer.token_ids[0] != first
    params = SamplingParams(temperature=0, min_tokens=1, ignore_eos=True, max_tokens=1)
    request = make_request("c", prompt, params)
    request.eos_token_ids = (first,)
    answer = Driver(make_executor(program), all_at_once).run([request])["c"]
    assert answer.token_ids == [first]


def test_padding_of_the_vocabulary_is_never_chosen(program: Program) -> None:
    executor = NativeExecutor(program, kv_cache_bytes=2**20, num_valid_tokens=3, num_threads=1)
    params = SamplingParams(temperature=100.0, logprobs=5, max_tokens=30)
    answer = Driver(executor, all_at_once).run([make_request("a", [0, 1, 2], params)])["a"]
    assert set(answer.token_ids) == {0, 1, 2}
    for entry in answer.logprobs:
        assert entry is not None
        assert {token for token, _ in entry.top} == {0, 1, 2}


def test_a_bad_request_is_an_error_of_its_own(program: Program) -> None:
    good, bad = (make_request(name, [1, 2, 3]) for name in ("good", "bad"))
    bad.sampling_params = SamplingParams(logit_bias={101: 1.0})
    answers = Driver(make_executor(program), all_at_once).run([bad, good])
    assert "101" in (answers["bad"].error or "")
    alone = Driver(make_executor(program), all_at_once).run([make_request("good", [1, 2, 3])])
    assert answers["good"] == alone["good"]


def test_logits_that_are_not_finite_fail_their_request_alone(program: Program) -> None:
    def changed(name: str, index: int, new_name: str) -> WeightTensor:
        values = program.weights[name].data.view(np.float32).copy()
        values[index] = 3e38
        return replace(program.weights[name], name=new_name, data=values.view(np.uint8))

    # Untied, so that only rows that read token 7 become infinite where the bias is added.
    weights = {
        "read": changed("embedding", 7 * 36, "read"),
        "1.down.bias": changed("1.down.bias", 0, "1.down.bias"),
    }
    broken = replace(
        program,
        ops=(replace(program.ops[0], weight="read"), *program.ops[1:]),  # type: ignore[arg-type]  # any field
        weights={**program.weights, **weights},
    )
    requests = [make_request("good", [1, 2, 3]), make_request("bad", [1, 3, 7])]
    answers = Driver(make_executor(broken), all_at_once).run(requests)
    assert "not finite" in (answers["bad"].error or "")
    alone = Driver(make_executor(broken), all_at_once).run([make_request("good", [1, 2, 3])])
    assert answers["good"] == alone["good"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [1, 101]}, "token id 101"),
        ({"token_ids": [1, -1]}, "token id -1"),
        ({"block_table": [200]}, "block id 200"),
        ({"block_table": [-1]}, "block id -1"),
        ({"block_table": []}, "block table"),
        ({"num_computed_tokens": 15}, "block table 1"),
        ({"num_computed_tokens": -1}, "-1"),
        ({"num_computed_tokens": 1023, "block_table": list(range(70))}, "position 1024"),
        ({"token_ids": []}, "needs a token"),
    ],
)
def test_an_index_out_of_range_is_refused(
    program: Program, changes: dict[str, object], message: str
) -> None:
    executor = make_executor(program)
    for compute in (executor.execute, executor.logits):
        with pytest.raises(ValueError, match=message):
            compute(one_request_step([1, 2], **changes))
    executor.execute(one_request_step([1, 2]))


def test_a_sampling_state_lives_until_its_request_is_finished(program: Program) -> None:
    executor = make_executor(program)
    for name in "abc":
        request = make_request(name, [1, 2])
        scheduled = ScheduledRequest(request, [1, 2], 0, [0], sample=True)
        executor.execute(ScheduledStep(1, [scheduled], finished_request_ids=["unknown"]))
    executor.execute(ScheduledStep(2, finished_request_ids=["a", "b", "c"]))
    answers = Driver(executor, all_at_once).run(mixed_requests(7))
    assert answers == Driver(make_executor(program), all_at_once).run(mixed_requests(7))


@pytest.mark.parametrize("name", ["1.attn_norm", "0.k.bias", "1.down", "embedding"])
def test_a_weight_that_is_not_finite_is_refused_by_name(program: Program, name: str) -> None:
    values = program.weights[name].data.view(np.float32).copy()
    values[-1] = np.nan
    damaged = replace(program.weights[name], data=values.view(np.uint8))
    weights = {**program.weights, name: damaged}
    with pytest.raises(ValueError, match=f"{name}: a weight is not finite"):
        make_executor(replace(program, weights=weights))


def test_a_pool_of_less_than_two_blocks_is_refused(program: Program) -> None:
    block_bytes = make_executor(program).block_bytes
    with pytest.raises(ValueError, match=rf"{2 * block_bytes - 1} bytes holds 1 .* {block_bytes} "):
        NativeExecutor(program, kv_cache_bytes=2 * block_bytes - 1, num_valid_tokens=101)


def test_a_closed_executor_refuses_steps(program: Program) -> None:
    executor = make_executor(program)
    executor.close()
    with pytest.raises(RuntimeError, match="closed"):
        executor.execute(one_request_step([1, 2]))


def test_shapes_that_contradict_each_other_are_refused(program: Program) -> None:
    wrong = Add(View("hidden", 0, 36), View("qkv", 0, 35))
    with pytest.raises(ValueError, match="35 columns, expected 36"):
        make_executor(replace(program, ops=(*program.ops[:-1], wrong, program.ops[-1])))
    with pytest.raises(ValueError, match="end with logits"):
        make_executor(replace(program, ops=program.ops[:-1]))


def test_the_environment_names_the_instruction_set(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_ISA", "portable")
    assert make_executor(program).isa == "portable"
    monkeypatch.setenv("SHOAL_ISA", "sse9")
    with pytest.raises(ValueError, match="sse9"):
        make_executor(program)
