import gzip
import json

import pytest

from shoal.bench.workloads.lengths import LengthRange
from shoal.bench.workloads.prompts import WORDS
from shoal.bench.workloads.workload import Workload, WorkloadError, generate_requests
from shoal.model.loader import open_model
from shoal.model.tokenizer import Tokenizer

VOCABULARY = range(100, 5000)


def prompts(workload, vocabulary=VOCABULARY, salt=""):
    return [request.prompt for request in generate_requests(workload, vocabulary, salt)]


def dataset(directory, *rows, name="prompts.jsonl"):
    path = directory / name
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def test_a_salt_changes_the_prompts_and_not_the_lengths():
    workload = Workload(num_requests=10)
    plain, salted, other = (prompts(workload, salt=salt) for salt in ("", "a", "b"))
    assert list(map(len, plain)) == list(map(len, salted)) == list(map(len, other))
    first_tokens = {tuple(prompt[:16]) for prompt in plain + salted + other}
    assert len(first_tokens) == 30
    assert prompts(workload, salt="a") == salted


def test_a_shared_prefix_is_the_same_in_all_prompts_and_fresh_with_each_salt():
    workload = Workload(num_requests=5, input_len=LengthRange(10, 20), shared_prefix_len=64)
    runs = [prompts(workload, salt=salt) for salt in ("", "a")]
    for run in runs:
        assert len({tuple(prompt[:64]) for prompt in run}) == 1
        assert len({tuple(prompt[64:74]) for prompt in run}) == 5
        assert all(74 <= len(prompt) <= 84 for prompt in run)
    assert runs[0][0][:64] != runs[1][0][:64]


def test_words_make_text_of_as_many_words_as_tokens_were_asked():
    workload = Workload(num_requests=5, input_len=LengthRange(30, 30), shared_prefix_len=10)
    for prompt in prompts(workload, WORDS):
        assert len(prompt.split(" ")) == 40


def test_words_are_a_token_each_for_the_demo_model(model_path):
    tokenizer = Tokenizer.from_gguf(open_model(model_path).metadata)
    assert len(set(WORDS)) == len(WORDS)
    assert [word for word in WORDS if len(tokenizer.encode(f" {word}")) != 1] == []


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Say hello"},
        {"question": "Say hello", "answer": "hello"},
        {"turns": ["Say hello", "Again"]},
        {"text": "Say hello"},
    ],
)
def test_the_prompts_of_a_dataset_are_found(tmp_path, row):
    workload = Workload(num_requests=1, dataset=dataset(tmp_path, row))
    assert prompts(workload) == ["Say hello"]


def test_a_compressed_dataset_is_read(tmp_path):
    path = dataset(tmp_path, {"prompt": "a"}, name="prompts.jsonl.gz")
    assert prompts(Workload(num_requests=1, dataset=path)) == ["a"]


def test_a_dataset_is_shuffled_by_the_seed_and_repeats_when_used_up(tmp_path):
    texts = [f"prompt {number}" for number in range(20)]
    path = dataset(tmp_path, *({"prompt": text} for text in texts))
    runs = [prompts(Workload(num_requests=25, dataset=path, seed=seed)) for seed in (1, 2)]
    for run in runs:
        assert sorted(run[:20]) == sorted(texts)
        assert run[20:] == run[:5]
    assert runs[0] != runs[1]


def test_a_salt_makes_each_prompt_of_a_dataset_new(tmp_path):
    path = dataset(tmp_path, {"prompt": "Say hello"})
    workload = Workload(num_requests=3, dataset=path, shared_prefix_len=4)
    first, second = (prompts(workload, salt=salt) for salt in ("a", "b"))
    assert len(set(first + second)) == 6
    for prompt in first:
        assert prompt.endswith(") Say hello")
    assert len({prompt.partition("(")[0] for prompt in first}) == 1


def test_the_output_lengths_of_a_dataset_are_drawn(tmp_path):
    workload = Workload(dataset=dataset(tmp_path, {"prompt": "a"}), output_len=LengthRange(3, 5))
    drawn = {request.max_tokens for request in generate_requests(workload, VOCABULARY)}
    assert drawn == {3, 4, 5}


@pytest.mark.parametrize("row", [{}, [], 3, {"prompt": 3}, {"prompt": ""}, {"turns": []}])
def test_a_row_without_a_prompt_is_refused_with_its_line(tmp_path, row):
    path = dataset(tmp_path, {"prompt": "a"}, row)
    with pytest.raises(WorkloadError, match="line 2"):
        generate_requests(Workload(dataset=path), VOCABULARY)


def test_an_empty_dataset_and_one_that_is_no_json_are_refused(tmp_path):
    with pytest.raises(WorkloadError, match="has no prompts"):
        generate_requests(Workload(dataset=dataset(tmp_path)), VOCABULARY)
    (tmp_path / "prompts.jsonl").write_text("hello\n")
    with pytest.raises(WorkloadError, match="line 1"):
        generate_requests(Workload(dataset=tmp_path / "prompts.jsonl"), VOCABULARY)


def test_text_is_not_taken_for_token_ids(tmp_path):
    (request,) = generate_requests(
        Workload(num_requests=1, dataset=dataset(tmp_path, {"prompt": "a"})), VOCABULARY
    )
    with pytest.raises(WorkloadError, match="text, not token ids"):
        _ = request.prompt_token_ids
