"""What the tokenizer makes of a file's metadata: rules, flags, and what it refuses."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from shoal.model.chat import ChatTemplate
from shoal.model.errors import ModelFileError
from shoal.model.pretokenizers import find_pre_tokenizer
from shoal.model.tokenizer import Tokenizer
from shoal.model.vocabulary import TokenType

PREFIX = "tokenizer.ggml."
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*LETTERS, "he", "hel", "<s>", "</s>", "<think>", "<é>", "unused", "12"]
TYPES = [TokenType.NORMAL] * len(TOKENS)
BOS, EOS, THINK, ACCENTED, UNUSED = (
    TOKENS.index(token) for token in ("<s>", "</s>", "<think>", "<é>", "unused")
)
TYPES[BOS] = TYPES[EOS] = TokenType.CONTROL
TYPES[THINK] = TYPES[ACCENTED] = TokenType.USER_DEFINED
TYPES[UNUSED] = TokenType.UNUSED


def byte_level_metadata(**changes: Any) -> dict[str, object]:
    """The metadata of a small byte-level vocabulary; a change to `None` leaves the key out."""
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [int(kind) for kind in TYPES],
        "merges": ["h e", "he l"],
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    } | changes
    return {PREFIX + key: value for key, value in values.items() if value is not None}


def sentencepiece_metadata(**changes: Any) -> dict[str, object]:
    golden = Path(__file__).parents[1] / "oracle" / "golden" / "tokenizer_sentencepiece.json.gz"
    metadata = json.loads(gzip.decompress(golden.read_bytes()))["metadata"]
    metadata |= {PREFIX + key: value for key, value in changes.items()}
    return {key: value for key, value in metadata.items() if value is not None}


def test_merges_join_letters() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    assert [tokenizer.token_text(i) for i in tokenizer.encode("hello")] == ["hel", "l", "o"]


@pytest.mark.parametrize(
    ("add_bos", "add_eos", "expected"),
    [
        (None, None, []),
        (False, False, []),
        (True, None, [BOS]),
        (None, True, [EOS]),
        (True, True, [BOS, EOS]),
    ],
)
def test_a_raw_text_gets_the_tokens_that_the_file_wants(
    add_bos: bool | None, add_eos: bool | None, expected: list[int]
) -> None:
    metadata = byte_level_metadata(add_bos_token=add_bos, add_eos_token=add_eos)
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("") == expected
    added = [i for i in tokenizer.encode("hello") if tokenizer.is_special(i)]
    assert added == expected
    assert not any(map(tokenizer.is_special, tokenizer.encode("hello", add_special_tokens=False)))


def test_a_bos_that_the_text_has_already_is_not_added_again() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=True, add_eos_token=True))
    assert tokenizer.encode("<s>hello</s>") == tokenizer.encode("hello")
    literal = tokenizer.encode("<s>", parse_special=False)
    assert literal[0] == BOS
    assert tokenizer.decode(literal) == "<s>"


@pytest.mark.parametrize("metadata", [byte_level_metadata, sentencepiece_metadata])
@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("source", ["{{ bos_token }}{{ messages[0].content }}", "hel"])
def test_a_chat_has_the_bos_of_its_template_alone(
    metadata: Callable[..., dict[str, object]], add_bos: bool, source: str
) -> None:
    values = metadata(add_bos_token=add_bos) | {"tokenizer.chat_template": source}
    tokenizer = Tokenizer.from_gguf(values)
    template = ChatTemplate.from_gguf(values, tokenizer)
    assert template is not None
    prompt = template.render([{"role": "user", "content": "hel"}])
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id) == source.count("bos_token")
    assert tokenizer.decode(ids) == "hel"


def test_sentencepiece_adds_bos_unless_told_otherwise() -> None:
    silent = Tokenizer.from_gguf(sentencepiece_metadata(add_bos_token=None))
    assert silent.encode("a")[0] == silent.bos_token_id
    refused = Tokenizer.from_gguf(sentencepiece_metadata(add_bos_token=False))
    assert refused.bos_token_id not in refused.encode("a")


def test_user_defined_tokens_are_found_in_text_and_not_skipped() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    for parse_special in (True, False):
        ids = tokenizer.encode("h<think><é>", parse_special=parse_special)
        assert ids[1:] == [THINK, ACCENTED]
        assert tokenizer.decode(ids) == "h<think><é>"


def test_unused_tokens_are_neither_found_nor_special() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata())
    assert UNUSED not in tokenizer.encode("unused")
    assert tokenizer.decode([UNUSED]) == "unused"


def test_padding_is_special_only_if_it_is_no_ordinary_token() -> None:
    padding = TOKENS.index("!")
    typed = Tokenizer.from_gguf(byte_level_metadata(padding_token_id=padding))
    assert typed.decode([padding]) == "!"
    untyped = byte_level_metadata(padding_token_id=padding, token_type=None)
    assert Tokenizer.from_gguf(untyped).decode([padding]) == ""


def test_whole_words_come_before_merges_where_the_rule_says_so() -> None:
    for pre, expected in (("gpt-2", ["1", "2"]), ("llama-bpe", ["12"])):
        tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre=pre, add_bos_token=False))
        assert [tokenizer.token_text(i) for i in tokenizer.encode("12")] == expected


def test_a_vocabulary_without_bytes_encodes_the_rest_as_unknown() -> None:
    metadata = {
        "model": "llama",
        "tokens": ["<unk>", "▁", "a", "▁a"],
        "token_type": [2, 1, 1, 1],
        "scores": [0.0, -2.0, -3.0, -1.0],
        "unknown_token_id": 0,
    }
    tokenizer = Tokenizer.from_gguf({PREFIX + key: value for key, value in metadata.items()})
    assert tokenizer.encode("a é") == [3, 1, 0]
    assert tokenizer.decode([3, 0, 2]) == "aa"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "Don't  go 1234\n\n x", ["Don", "'t", " ", " go", " 1234", "\n\n", " x"]),
        ("default", "I'LL", ["I", "'", "LL"]),
        ("smollm", "a  12", ["a", " ", " 12"]),
        ("starcoder", "a  12", ["a", "  ", "1", "2"]),
        ("llama-bpe", "I'LL pay 12345!\n\nx", ["I", "'LL", " pay", " ", "123", "45", "!\n\n", "x"]),
        ("qwen2", "I'LL pay 12!", ["I", "'LL", " pay", " ", "1", "2", "!"]),
        ("tekken", "camelCase a/b 12", ["camel", "Case", " a", "/b", " ", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
    ],
)
def test_rules_cut_text_into_words(name: str, text: str, words: list[str]) -> None:
    cut = find_pre_tokenizer(name).build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def test_an_unknown_rule_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelFileError, match=r"'klingon'.*supported are command-r, .*, tekken"):
        Tokenizer.from_gguf(byte_level_metadata(pre="klingon"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "has no tokenizer"),
        ({"model": "bert"}, "'bert'.*supported are gpt2, llama"),
        ({"model": 3}, "model must be of type str, got 3"),
        ({"tokens": None}, "has no tokens"),
        ({"tokens": "abc"}, "tokens must be an array of strings"),
        ({"tokens": ["a", 1]}, "tokens must be an array of strings"),
        ({"token_type": [1]}, f"token_type has 1 entries for {len(TOKENS)} tokens"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["he"]}, "Merge 0 .* got 'he'"),
        ({"merges": ["h z"]}, "merges of the tokenizer don't fit its tokens: .*hz"),
        ({"bos_token_id": len(TOKENS)}, f"bos_token_id is {len(TOKENS)}, but there are"),
        ({"eos_token_id": True}, "eos_token_id must be of type int, got True"),
        ({"add_bos_token": 1}, "add_bos_token must be of type bool, got 1"),
    ],
)
def test_wrong_metadata_are_refused_by_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        Tokenizer.from_gguf(byte_level_metadata(**changes))


def test_sentencepiece_needs_scores_or_merges() -> None:
    with pytest.raises(ModelFileError, match="scores is missing"):
        Tokenizer.from_gguf(sentencepiece_metadata(scores=None))
