"""How text is cut into words before byte-level BPE merges within them.

A vocabulary's merges are only right for the words that it was trained on, so each file names its
rule (`tokenizer.ggml.pre`). The rules follow HF transformers' conversion of GGUF files, and where
that has none for a name, the tokenizer that the model was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, pre_tokenizers

from shoal.model.errors import ModelFileError

_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PUNCTUATION_OR_SLASH: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"

# Words whose capitals come first: "HTTPServer" stays whole, "camelCase" is two.
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LOWER_CASED: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+"
_UPPER_CASED: Final = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"

_LLAMA3: Final = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACES))
_QWEN2: Final = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", _PUNCTUATION, _SPACES))
_TEKKEN: Final = "|".join((_LOWER_CASED, _UPPER_CASED, r"\p{N}", _PUNCTUATION_OR_SLASH, _SPACES))
_GPT4O: Final = "|".join(
    (
        f"{_LOWER_CASED}{_CONTRACTIONS}?",
        f"{_UPPER_CASED}{_CONTRACTIONS}?",
        r"\p{N}{1,3}",
        _PUNCTUATION_OR_SLASH,
        _SPACES,
    )
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rule that a name stands for.

    `pattern` finds the words; `None` is the pattern of GPT-2. `split_digits` first makes each digit
    a word. With `whole_words_first` a word that is a token becomes it, whatever the merges say.
    `add_bos_token` holds where the file doesn't say.
    """

    pattern: str | None = None
    split_digits: bool = False
    whole_words_first: bool = False
    add_bos_token: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rule as the `tokenizers` library applies it; the words come out in byte letters."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.split_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        )
        return pre_tokenizers.Sequence(steps)


_GPT2_RULE: Final = PreTokenizer()
_DIGITS_RULE: Final = PreTokenizer(split_digits=True)
_LLAMA3_RULE: Final = PreTokenizer(_LLAMA3, whole_words_first=True, add_bos_token=True)
_QWEN2_RULE: Final = PreTokenizer(_QWEN2)
_GPT4O_RULE: Final = PreTokenizer(_GPT4O)

_PRE_TOKENIZERS: Final = {
    "default": _GPT2_RULE,
    "gpt-2": _GPT2_RULE,
    "olmo": _GPT2_RULE,
    "phi-2": _GPT2_RULE,
    # SmolLM was trained with each digit a word of its own, and llama.cpp does that; the conversion
    # of HF transformers uses the rule of GPT-2, and Shoal's ids equal those. As no merge joins
    # digits, the two differ only at digits behind two or more spaces and at some digits beyond
    # ASCII: "a  1" is "a", " ", " ", "1" here and "a", "  ", "1" there.
    "smollm": _GPT2_RULE,
    "command-r": _DIGITS_RULE,
    "refact": _DIGITS_RULE,
    "starcoder": _DIGITS_RULE,
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "falcon3": _LLAMA3_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "pixtral": _LLAMA3_RULE,
    "deepseek-r1-qwen": _QWEN2_RULE,
    "megrez": _QWEN2_RULE,
    "qwen2": _QWEN2_RULE,
    "tekken": PreTokenizer(_TEKKEN, whole_words_first=True, add_bos_token=True),
    "gpt-4o": _GPT4O_RULE,
    "llama4": _GPT4O_RULE,
}


def find_pre_tokenizer(name: str | None) -> PreTokenizer:
    """The rule of this name, GPT-2's where the file names none; raises `ModelFileError`."""
    if name is None:
        return _GPT2_RULE
    rule = _PRE_TOKENIZERS.get(name)
    if rule is None:
        raise ModelFileError(
            f"The pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            f"supported are {', '.join(sorted(_PRE_TOKENIZERS))}."
        )
    return rule
