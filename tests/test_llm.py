"""The offline front door, with a tiny real model in this process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import write_tiny_model

from shoal import LLM, SamplingParams
from shoal.request import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(tiny_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_path), kv_cache_memory_mib=16, max_num_seqs=4, max_waiting_requests=3) as llm:
        yield llm


def test_outputs_are_in_the_order_of_the_prompts_also_in_a_second_call(llm: LLM) -> None:
    prompts = [[index + 5] * (1 + index * 7 % 11) for index in range(10)]
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    for order in (prompts, prompts[::-1]):
        outputs = llm.generate(order, GREEDY)
        assert [output.prompt_token_ids for output in outputs] == order
        assert [output.token_ids for output in outputs] == [alone[prompts.index(p)] for p in order]


def test_strings_and_token_ids_may_be_mixed(llm: LLM) -> None:
    text, ids = llm.generate(["Hello", llm.tokenizer.encode("Hello")], GREEDY)
    assert (text.prompt, ids.prompt) == ("Hello", None)
    assert text.token_ids == ids.token_ids
    assert text.text == ids.text == llm.tokenizer.decode(text.token_ids)


def test_a_single_string_is_one_prompt(llm: LLM) -> None:
    assert len(llm.generate("Hello", GREEDY)) == 1


def test_a_bad_row_is_an_error_row_and_the_others_go_on(llm: LLM) -> None:
    rows = [[5], [], "x" * 3000, [10**9], 7, "\ud800", [5]]
    outputs = llm.generate(rows, GREEDY)  # type: ignore[arg-type]  # on purpose
    errors = [output.error for output in outputs]
    assert errors[0] is None
    assert errors[-1] is None
    for error, part in zip(
        errors[1:-1], ["at least one", "256", "1000000000", "7", "U+D800"], strict=True
    ):
        assert part in str(error)
    assert outputs[1].finish_reason is FinishReason.ERROR
    assert outputs[0].token_ids == outputs[-1].token_ids


def test_more_samples_than_the_queue_holds_are_an_error_row(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(n=4))
    assert "the limit is 3" in str(output.error)
    assert not llm.stats.num_requests_waiting


def test_all_samples_are_in_completions_and_the_first_in_front(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True, logprobs=1)
    (output,) = llm.generate([[5, 6]], params)
    assert len({tuple(completion.token_ids) for completion in output.completions}) == 3
    assert output.token_ids == output.completions[0].token_ids
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    assert output.metrics is not None
    assert output.metrics.e2e_time >= output.metrics.ttft


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 5)]
    assert [len(output.token_ids) for output in llm.generate([[5], [5]], params)] == [1, 5]
    with pytest.raises(ValueError, match="1 prompts, but 2 sampling_params"):
        llm.generate([[5]], params)


def test_the_same_seed_gives_the_same_answer_and_another_another(llm: LLM) -> None:
    params = [SamplingParams(seed=s, max_tokens=12, ignore_eos=True) for s in (1, 2, 1)]
    first, other, again = (o.token_ids for o in llm.generate([[5]] * 3, params))
    assert first == again != other


def test_prompt_logprobs_cover_all_but_the_first_token(llm: LLM) -> None:
    prompt = list(range(5, 38))
    (output,) = llm.generate([prompt], SamplingParams(prompt_logprobs=1, max_tokens=1))
    assert output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.prompt_logprobs] == prompt[1:]


def test_an_answer_ends_with_the_context(llm: LLM) -> None:
    (output,) = llm.generate([[5] * 250], SamplingParams(ignore_eos=True))
    assert len(output.token_ids) == 6
    assert output.finish_reason is FinishReason.LENGTH


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    (single,) = llm.chat(messages, GREEDY)
    assert single.prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    several = llm.chat([messages, messages], GREEDY)
    assert [output.token_ids for output in several] == [single.token_ids] * 2


def test_an_interrupted_call_leaves_nothing_running(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm._engine.step
    steps = iter(range(3))

    def interrupted_step() -> object:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine, "step", interrupted_step)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5]] * 10, GREEDY)
    assert llm.stats.num_blocks_used == llm.stats.num_requests_waiting == 0
    assert llm.generate([[5]], GREEDY)[0].error is None


def test_preemption_changes_no_token_and_no_logprob(tiny_path: Path) -> None:
    params = [
        SamplingParams(seed=seed, max_tokens=360, ignore_eos=True, logprobs=2) for seed in range(30)
    ]
    prompts = [[5 + seed] * (1 + seed) for seed in range(30)]
    answers = []
    for kv_cache_memory_mib in (16, 1):
        with LLM(str(tiny_path), kv_cache_memory_mib=kv_cache_memory_mib) as llm:
            outputs = llm.generate(prompts, params)
            answers.append([(output.token_ids, output.logprobs) for output in outputs])
            num_preemptions = llm.stats.num_preemptions
    assert num_preemptions > 0
    assert answers[0] == answers[1]


def test_importing_shoal_loads_nothing_heavy() -> None:
    code = "import shoal, sys; print({'numpy', 'tokenizers', 'zmq', 'jinja2'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"


def test_the_demo_model_knows_the_capital_of_france(model_path: Path) -> None:
    with LLM(str(model_path), kv_cache_memory_mib=64) as llm:
        (output,) = llm.generate(["The capital of France is"], GREEDY)
    assert "Paris" in output.text


def test_a_queue_too_short_for_another_row_of_samples_keeps_no_batch_waiting(
    tiny_path: Path,
) -> None:
    settings = {"scheduler": "static", "max_num_seqs": 4, "max_waiting_requests": 4}
    with LLM(str(tiny_path), kv_cache_memory_mib=16, **settings) as llm:
        params = SamplingParams(n=3, temperature=0.0, max_tokens=2, ignore_eos=True)
        outputs = llm.generate([[5], [6], [7]], params)
    assert [len(output.completions) for output in outputs] == [3] * 3
