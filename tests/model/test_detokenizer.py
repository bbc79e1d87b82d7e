"""Incremental detokenising: whatever the tokens and the calls, the text is that of `decode`."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from shoal.model.detokenizer import IncrementalDetokenizer
from shoal.model.gguf import GGUFFile
from shoal.model.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden" / "tokenizer_sentencepiece.json.gz"
TEXTS = [
    "한국어 문장",
    "👩🏽‍🚀 and 🏴‍☠️!",
    "日本語とemoji🦑混在",
    "plain words, then 🫠",
    "e\u0301 שָׁלוֹם ١٢٣",
]


def byte_letter_tokenizer() -> Tokenizer:
    """A token for each byte, three that hold parts of characters, and a control token."""
    spelled = {letter: letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet())}
    tokens = [*spelled, "ðŁ", "ĺĢ", "íķľêµ", "<|end|>"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
            "tokenizer.ggml.merges": ["ð Ł", "ĺ Ģ"],
        }
    )


BYTE_LEVEL = byte_letter_tokenizer()
SENTENCEPIECE = Tokenizer.from_gguf(json.loads(gzip.decompress(GOLDEN.read_bytes()))["metadata"])
TOKENIZERS = [
    pytest.param(BYTE_LEVEL, id="byte-level"),
    pytest.param(SENTENCEPIECE, id="sentencepiece"),
]


def deltas(detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """What comes out when `ids` are pushed in parts cut at `cuts`, and then flushed."""
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [
        *(detokenizer.push(ids[start:end]) for start, end in pairwise(bounds)),
        detokenizer.flush(),
    ]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(deadline=None)
@given(data=st.data(), skip=st.booleans(), continues=st.booleans())
def test_any_ids_in_any_parts_give_the_text_of_decode(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, continues: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=10))
    detokenizer = IncrementalDetokenizer(tokenizer, skip, continues_text=continues)
    whole = tokenizer.decode(ids, skip, continues_text=continues)
    assert "".join(deltas(detokenizer, ids, cuts)) == whole


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@settings(deadline=None)
@given(text=st.text(), data=st.data())
def test_the_tokens_of_any_text_give_it_back_without_replacements(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    text = text.replace("\ufffd", "?")
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=10))
    parts = deltas(IncrementalDetokenizer(tokenizer, skip_special_tokens=False), ids, cuts)
    assert not any("\ufffd" in part for part in parts)
    # SentencePiece's spaces come from "▁", and the first is the tokenizer's own.
    spaced = text.replace("▁", " ").removeprefix(" ")
    assert "".join(parts) == (spaced if tokenizer.strips_leading_space else text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_characters_spread_over_tokens_come_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer)
    parts = [detokenizer.push([token_id]) for token_id in ids]
    assert "".join(parts) == text
    assert detokenizer.flush() == ""


def test_the_real_vocabulary_spreads_characters_over_tokens(model_path: Path) -> None:
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(model_path).metadata)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        parts = deltas(IncrementalDetokenizer(tokenizer), ids, [*range(99)])
        assert "" in parts[:-1]
        assert "".join(parts) == text


def test_a_byte_fallback_emoji_is_held_back_until_its_last_byte() -> None:
    ids = SENTENCEPIECE.encode("🦑", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    assert [detokenizer.push([token_id]) for token_id in ids[-4:]] == ["", "", "", "🦑"]


def test_a_token_may_end_one_character_and_begin_the_next() -> None:
    whole, middle, rest = "한국".encode(), 4, 6
    letters = {BYTE_LEVEL.token_bytes(i): i for i in range(256)}
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    ids = [letters[bytes([byte])] for byte in whole]
    assert detokenizer.push(ids[:middle]) == "한"
    assert detokenizer.push(ids[middle:rest]) == "국"


def test_an_end_within_a_character_is_flushed_as_a_replacement() -> None:
    ids = SENTENCEPIECE.encode("ok 🦑", add_special_tokens=False)[:-1]
    detokenizer = IncrementalDetokenizer(SENTENCEPIECE)
    assert detokenizer.push(ids) == "ok "
    assert detokenizer.flush() == "\ufffd"


def test_bytes_that_cannot_become_a_character_are_replaced_at_once() -> None:
    letters = {BYTE_LEVEL.token_bytes(i): i for i in range(256)}
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert detokenizer.push([letters[b"\xf0"], letters[b"\x9f"]]) == ""
    assert detokenizer.push([letters[b"a"]]) == "\ufffda"
    assert detokenizer.push([letters[b"\xff"]]) == "\ufffd"


def test_a_special_token_within_a_character_does_not_disturb_it() -> None:
    end = BYTE_LEVEL.vocab_size - 1
    first, second = BYTE_LEVEL.encode("😀")
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL)
    assert [detokenizer.push([i]) for i in (first, end, second)] == ["", "", "😀"]
