"""Text to token ids and back, out of the metadata of a GGUF file.

Encoding is done by the `tokenizers` library; its ids equal those of HF transformers' conversion of
the same file. Decoding is done here, on bytes: a token is a byte string, and a text is the UTF-8
that its tokens spell together. That makes it exact whatever tokens a character is spread over.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from shoal.model.errors import ModelFileError
from shoal.model.pretokenizers import find_pre_tokenizer
from shoal.model.vocabulary import TokenizerModel, TokenType, Vocabulary

# SentencePiece writes a space as this letter, and a byte that no token covers as "<0x0A>".
_SPACE_LETTER: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


class InvalidTextError(ValueError):
    """A string is no Unicode text and so has no token ids."""


class Tokenizer:
    """Encodes and decodes for one model. Safe to share between threads."""

    __slots__ = (
        "_add_bos",
        "_bytes",
        "_encode_plain",
        "_encode_special",
        "_special_id_of_text",
        "_special_ids",
        "_spell",
        "_strips_space",
        "_vocabulary",
    )

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Builds the encoder; raises `ModelFileError` where the vocabulary contradicts itself."""
        if vocabulary.model is TokenizerModel.BYTE_LEVEL:
            rule = find_pre_tokenizer(vocabulary.pre)
            model = _byte_level_model(vocabulary, rule.whole_words_first)
            splitter = rule.build()
            default_add_bos = rule.add_bos_token
            self._spell: Callable[[str], bytes] = _spell_byte_letters
        else:
            model = _sentencepiece_model(vocabulary)
            splitter = _sentencepiece_splitter(vocabulary)
            default_add_bos = True
            self._spell = _spell_sentencepiece
        self._vocabulary = vocabulary
        self._strips_space = (
            vocabulary.model is TokenizerModel.SENTENCEPIECE and vocabulary.add_space_prefix
        )
        add_bos = vocabulary.add_bos_token
        self._add_bos = default_add_bos if add_bos is None else add_bos
        self._special_ids = vocabulary.special_token_ids()
        self._special_id_of_text = {vocabulary.tokens[i]: i for i in sorted(self._special_ids)}
        verbatim = vocabulary.ids_of_type(TokenType.USER_DEFINED)
        # Two encoders over one model, because whether special tokens are parsed is a state of the
        # library's encoder and would otherwise be shared between threads.
        self._encode_plain = _encoder(model, splitter, vocabulary, verbatim)
        self._encode_special = _encoder(
            model, splitter, vocabulary, verbatim + sorted(self._special_ids)
        )
        self._bytes: list[bytes | None] = [None] * len(vocabulary.tokens)
        if vocabulary.model is TokenizerModel.BYTE_LEVEL:
            for token_id in {*verbatim, *self._special_ids}:
                self._bytes[token_id] = vocabulary.tokens[token_id].encode()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """The tokenizer that a GGUF file describes.

        `metadata` maps the file's keys to Python values, arrays to lists. Raises `ModelFileError`
        naming the key for what is missing, contradictory or not supported.
        """
        return cls(Vocabulary.from_gguf(metadata))

    @property
    def vocab_size(self) -> int:
        """The number of tokens. The model's embedding may have more rows, as padding."""
        return len(self._vocabulary.tokens)

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a sequence."""
        return self._vocabulary.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a sequence."""
        return self._vocabulary.eos_token_id

    @property
    def strips_leading_space(self) -> bool:
        """Whether encoding puts a space before a text, which decoding takes away again."""
        return self._strips_space

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`; None when there is none."""
        return self._special_id_of_text.get(text)

    def is_special(self, token_id: int) -> bool:
        """Whether the token structures a text, as `<|im_end|>` does, and is no part of it."""
        return token_id in self._special_ids

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The token ids of a text.

        With `add_special_tokens` the tokens that the model wants around a text are added: the
        beginning of sequence, or the end, or none, as its file says; one that the text has already
        is not added twice. A rendered chat template holds them itself, so pass False for it. With
        `parse_special` a special token written in the text becomes that token, as in HF
        transformers; without, it is text like any other. Raises `InvalidTextError` for lone
        surrogates.
        """
        encoder = self._encode_special if parse_special else self._encode_plain
        try:
            # Unlike encode(), this lets other threads run meanwhile.
            (encoding,) = encoder.encode_batch_fast([text], add_special_tokens=False)
        except TypeError:
            _refuse_lone_surrogate(text)
            raise
        ids: list[int] = encoding.ids
        if add_special_tokens:
            bos, eos = self.bos_token_id, self.eos_token_id
            if self._add_bos and bos is not None and ids[:1] != [bos]:
                ids.insert(0, bos)
            if self._vocabulary.add_eos_token and eos is not None and ids[-1:] != [eos]:
                ids.append(eos)
        return ids

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        *,
        continues_text: bool = False,
    ) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD.

        Ids beyond the tokenizer have no text. `continues_text` says that the tokens follow others,
        so that a leading space is a space and not the one which SentencePiece puts before a text.
        """
        skipped = self._special_ids if skip_special_tokens else frozenset()
        spelled = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        text = spelled.decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self._strips_space and not continues_text else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; none for an id beyond the tokenizer."""
        if not 0 <= token_id < len(self._bytes):
            return b""
        spelled = self._bytes[token_id]
        if spelled is None:
            spelled = self._bytes[token_id] = self._spell(self._vocabulary.tokens[token_id])
        return spelled

    def token_text(self, token_id: int) -> str:
        """The token as text; U+FFFD where it holds only a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def _byte_letters() -> dict[str, int]:
    """The letter in which byte-level BPE writes each byte (Radford et al., 2019, GPT-2's code).

    Printable Latin-1 stands for itself; the other bytes take the letters from U+0100, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_LETTER: Final = _byte_letters()


def _spell_byte_letters(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode()


def _spell_sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE_LETTER, " ").encode()


def _encoder(
    model: models.Model,
    splitter: pre_tokenizers.PreTokenizer,
    vocabulary: Vocabulary,
    verbatim: Iterable[int],
) -> tokenizers.Tokenizer:
    """An encoder that finds the tokens `verbatim` in a text before the splitter and the merges."""
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = splitter
    encoder.add_tokens([AddedToken(vocabulary.tokens[i], normalized=False) for i in verbatim])
    return encoder


def _byte_level_model(vocabulary: Vocabulary, whole_words_first: bool) -> models.Model:
    if vocabulary.merges is None:
        raise ModelFileError("Byte-level BPE needs merges (tokenizer.ggml.merges is missing).")
    return _bpe(vocabulary, _split_merges(vocabulary.merges), ignore_merges=whole_words_first)


def _sentencepiece_model(vocabulary: Vocabulary) -> models.Model:
    merges = (
        _merges_by_score(vocabulary)
        if vocabulary.merges is None
        else _split_merges(vocabulary.merges)
    )
    unknown = vocabulary.unknown_token_id
    return _bpe(
        vocabulary,
        merges,
        byte_fallback=True,
        fuse_unk=True,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
    )


def _sentencepiece_splitter(vocabulary: Vocabulary) -> pre_tokenizers.PreTokenizer:
    # As HF transformers' conversion does it, the space goes before the text, but neither before a
    # text that begins with one nor after a special token. SentencePiece itself adds it always.
    return pre_tokenizers.Metaspace(
        replacement=_SPACE_LETTER,
        prepend_scheme="first" if vocabulary.add_space_prefix else "never",
        split=False,
    )


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: object) -> models.BPE:
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception for a merge without its token
        raise ModelFileError(
            f"The merges of the tokenizer don't fit its tokens: {error}."
        ) from error


def _split_merges(merges: Iterable[str]) -> list[tuple[str, str]]:
    pairs = []
    for index, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if not left or not right:
            raise ModelFileError(
                f"Merge {index} (tokenizer.ggml.merges) must be two tokens with a space between, "
                f"got {merge!r:.80}."
            )
        pairs.append((left, right))
    return pairs


def _merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: every split of a token, best score first.

    Ties go to the longer left part, then to the longer right part, then to the smaller id.
    """
    if not vocabulary.scores:
        raise ModelFileError(
            "SentencePiece BPE needs scores or merges (tokenizer.ggml.scores is missing)."
        )
    ids = {token: token_id for token_id, token in enumerate(vocabulary.tokens)}
    ranked = []
    for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((score, len(left), len(right), left, right))
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in ranked]


def _refuse_lone_surrogate(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTextError(
            f"The text has the lone surrogate U+{ord(text[error.start]):04X} at index "
            f"{error.start}, which stands for no character."
        ) from error
