"""The tokenizer against HF transformers; tests/oracle/make_tokenizer.py makes the golden values."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shoal.model.gguf import GGUFFile
from shoal.model.tokenizer import InvalidTextError, Tokenizer

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden"
IM_START, IM_END = 1, 2


def read_golden(name: str) -> dict[str, Any]:
    golden: dict[str, Any] = json.loads(gzip.decompress((GOLDEN / name).read_bytes()))
    return golden


@pytest.fixture(scope="module")
def byte_level(model_path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile.open(model_path).metadata)


@pytest.fixture(scope="module")
def byte_level_golden() -> dict[str, Any]:
    return read_golden("tokenizer_byte_level.json.gz")


@pytest.fixture(scope="module")
def sentencepiece_golden() -> dict[str, Any]:
    return read_golden("tokenizer_sentencepiece.json.gz")


@pytest.fixture(scope="module")
def sentencepiece(sentencepiece_golden: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_golden["metadata"])


def test_byte_level_ids_equal_those_of_transformers(
    byte_level: Tokenizer, byte_level_golden: dict[str, Any]
) -> None:
    cases = byte_level_golden["cases"]
    assert len(cases) >= 1000
    differing = [case["text"] for case in cases if byte_level.encode(case["text"]) != case["ids"]]
    assert not differing


def test_byte_level_ids_decode_to_their_text(
    byte_level: Tokenizer, byte_level_golden: dict[str, Any]
) -> None:
    for case in byte_level_golden["cases"]:
        assert byte_level.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_arbitrary_ids_decode_as_transformers_decodes_them(
    byte_level: Tokenizer, byte_level_golden: dict[str, Any]
) -> None:
    cases = byte_level_golden["random"]
    assert any("\ufffd" in case["text"] for case in cases)
    for case in cases:
        assert byte_level.decode(case["ids"]) == case["text"]
        assert byte_level.decode(case["ids"], skip_special_tokens=False) == case["all"]


def test_sentencepiece_ids_equal_those_of_transformers(
    sentencepiece: Tokenizer, sentencepiece_golden: dict[str, Any]
) -> None:
    for case in sentencepiece_golden["cases"]:
        ids = sentencepiece.encode(case["text"], add_special_tokens=False)
        assert ids == case["ids"], case["text"]
    for case in sentencepiece_golden["with_bos"]:
        assert sentencepiece.encode(case["text"]) == case["ids"]


def test_sentencepiece_ids_decode_as_transformers_decodes_them(
    sentencepiece: Tokenizer, sentencepiece_golden: dict[str, Any]
) -> None:
    for case in sentencepiece_golden["cases"]:
        assert sentencepiece.decode(case["ids"]) == case["decoded"]


def test_sentencepiece_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a🦑", add_special_tokens=False)
    assert [sentencepiece.token_bytes(i) for i in ids[-4:]] == [b"\xf0", b"\x9f", b"\xa6", b"\x91"]
    assert sentencepiece.decode(ids) == "a🦑"


def test_sentencepiece_without_a_space_prefix(sentencepiece_golden: dict[str, Any]) -> None:
    metadata = sentencepiece_golden["metadata"] | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode("Hello there", add_special_tokens=False)
    assert tokenizer.token_bytes(ids[0])[:1] == b"H"
    for text in ("Hello there", " Hello"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_continued_sentencepiece_text_keeps_its_space(sentencepiece: Tokenizer) -> None:
    prompt, whole = (sentencepiece.encode(text) for text in ("It is", "It is the"))
    assert whole[: len(prompt)] == prompt
    assert sentencepiece.decode(whole[len(prompt) :], continues_text=True) == " the"
    assert sentencepiece.decode(whole[len(prompt) :]) == "the"


def test_special_tokens_in_a_text_are_parsed_unless_refused(byte_level: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    parsed = byte_level.encode(text)
    assert (parsed[0], parsed[-1]) == (IM_START, IM_END)
    literal = byte_level.encode(text, parse_special=False)
    assert not any(map(byte_level.is_special, literal))
    assert byte_level.decode(literal) == text
    assert byte_level.decode(parsed) == "user\nhi"


def test_tokens_spell_their_text_in_bytes(byte_level: Tokenizer) -> None:
    text = "<|im_end|> naïve 한국어 👩‍🚀\n\t\x00"
    ids = byte_level.encode(text)
    assert b"".join(map(byte_level.token_bytes, ids)) == text.encode()
    assert byte_level.token_text(IM_END) == "<|im_end|>"
    assert byte_level.token_text(byte_level.encode("👩")[0]) == "\ufffd"


def test_what_the_file_says_of_special_tokens(byte_level: Tokenizer) -> None:
    assert byte_level.vocab_size == 49152
    assert (byte_level.bos_token_id, byte_level.eos_token_id) == (IM_START, IM_END)
    assert [i for i in range(byte_level.vocab_size) if byte_level.is_special(i)] == list(range(17))


@pytest.mark.parametrize("token_id", [49152, 10**9, -1])
def test_ids_beyond_the_tokenizer_have_no_text(byte_level: Tokenizer, token_id: int) -> None:
    assert byte_level.decode([token_id]) == ""
    assert byte_level.decode([*byte_level.encode("a b"), token_id]) == "a b"
    assert byte_level.token_bytes(token_id) == b""
    assert byte_level.token_text(token_id) == ""
    assert not byte_level.is_special(token_id)


def test_a_lone_surrogate_is_refused_by_its_place(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidTextError, match=r"lone surrogate U\+D83D at index 2"):
        byte_level.encode("ab\ud83d")


def test_threads_share_a_tokenizer(
    byte_level: Tokenizer, byte_level_golden: dict[str, Any]
) -> None:
    cases = byte_level_golden["cases"][:400]
    literal = [byte_level.encode(case["text"], parse_special=False) for case in cases]

    def differing(parse_special: bool) -> int:
        expected = [case["ids"] for case in cases] if parse_special else literal
        return sum(
            byte_level.encode(case["text"], parse_special=parse_special) != ids
            for case, ids in zip(cases, expected, strict=True)
        )

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(differing, [True, False] * 4)) == 0
