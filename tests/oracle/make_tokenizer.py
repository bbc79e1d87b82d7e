"""Makes the golden values of the tokenizer tests with HF transformers, or checks them.

python tests/oracle/make_tokenizer.py MODEL.gguf [--check]

MODEL.gguf is SmolLM2-135M-Instruct (alias smollm2-135m). The ids come from HF transformers'
conversion of GGUF files, `AutoTokenizer.from_pretrained(folder, gguf_file=name)`: of this file, and
of a tiny SentencePiece vocabulary that is trained here on the texts and written as a GGUF file. The
chat prompts come from `apply_chat_template`. Needs transformers, torch, gguf and sentencepiece.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import jinja2
import sentencepiece
from chat_templates import CONVERSATIONS, TEMPLATES, TOOLS
from tokenizer_texts import PROSE, SCRIPTS, snippets, tokenizer_texts
from transformers import AutoTokenizer, PreTrainedTokenizerBase

GOLDEN = Path(__file__).parent / "golden"
NUM_COMPOSED = 1200
NUM_COMPOSED_SENTENCEPIECE = 200
NUM_RANDOM_SEQUENCES = 300
PREFIX = "tokenizer.ggml."


def load_tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model.parent, gguf_file=model.name)


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[dict[str, Any]]:
    return [
        {"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids} for text in texts
    ]


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], *, skip: bool = True) -> str:
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def make_byte_level(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    special = ["<|im_start|>", "<|endoftext|>", "<repo_name>", "<empty_output>", "<|im_end|>"]
    generator = random.Random(7)
    anything = range(len(tokenizer))
    single_bytes = range(17, 17 + 256)  # behind the special tokens: mostly no UTF-8
    sequences = [
        generator.choices(generator.choice((anything, single_bytes)), k=generator.randint(1, 12))
        for _ in range(NUM_RANDOM_SEQUENCES)
    ]
    return {
        "cases": encode_all(tokenizer, tokenizer_texts(special, NUM_COMPOSED)),
        "random": [
            {"ids": ids, "text": decode(tokenizer, ids), "all": decode(tokenizer, ids, skip=False)}
            for ids in sequences
        ],
    }


def train_sentencepiece() -> sentencepiece.SentencePieceProcessor:
    """A BPE vocabulary with byte fallback, and with the settings that Llama's was trained with."""
    sentences = (line for text in snippets() for line in text.splitlines() if "\0" not in line)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=model,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        split_digits=True,
        control_symbols=["<|turn|>"],
        user_defined_symbols=["<think>"],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def sentencepiece_metadata(processor: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(processor.vocab_size())
    return {
        "model": "llama",
        "pre": "default",
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "token_type": [_token_type(processor, i) for i in ids],
        "bos_token_id": processor.bos_id(),
        "eos_token_id": processor.eos_id(),
        "unknown_token_id": processor.unk_id(),
        "add_bos_token": True,
        "add_eos_token": False,
        "add_space_prefix": True,
    }


def _token_type(processor: sentencepiece.SentencePieceProcessor, token_id: int) -> int:
    if processor.is_unknown(token_id):
        return int(gguf.TokenType.UNKNOWN)
    if processor.is_control(token_id):
        return int(gguf.TokenType.CONTROL)
    if processor.is_byte(token_id):
        return int(gguf.TokenType.BYTE)
    if processor.id_to_piece(token_id) == "<think>":
        return int(gguf.TokenType.USER_DEFINED)
    return int(gguf.TokenType.NORMAL)


def write_gguf(path: Path, metadata: dict[str, Any]) -> None:
    """A file without weights: what transformers reads to convert a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(metadata["tokens"]))
    writer.add_tokenizer_model(metadata["model"])
    writer.add_tokenizer_pre(metadata["pre"])
    writer.add_token_list(metadata["tokens"])
    writer.add_token_scores(metadata["scores"])
    writer.add_token_types(metadata["token_type"])
    writer.add_bos_token_id(metadata["bos_token_id"])
    writer.add_eos_token_id(metadata["eos_token_id"])
    writer.add_unk_token_id(metadata["unknown_token_id"])
    writer.add_add_bos_token(metadata["add_bos_token"])
    writer.add_add_eos_token(metadata["add_eos_token"])
    writer.add_add_space_prefix(metadata["add_space_prefix"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def make_sentencepiece() -> dict[str, Any]:
    processor = train_sentencepiece()
    metadata = sentencepiece_metadata(processor)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_gguf(path, metadata)
        tokenizer = load_tokenizer(path)
    special = ["<s>", "<|turn|>", "<think>", "</s>"]
    cases = encode_all(tokenizer, tokenizer_texts(special, NUM_COMPOSED_SENTENCEPIECE))
    for case in cases:
        case["decoded"] = decode(tokenizer, case["ids"])
    for text in (*PROSE, *SCRIPTS):
        if tokenizer(text, add_special_tokens=False).input_ids != processor.encode(text):
            raise SystemExit(f"transformers and sentencepiece differ on {text!r}")
    return {
        "metadata": {PREFIX + key: value for key, value in metadata.items()},
        "cases": cases,
        "with_bos": [
            {"text": text, "ids": tokenizer(text).input_ids} for text in ("", "Hello there")
        ],
    }


def make_chat(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Prompts of all templates; a template of `None` is the one in the model file."""
    cases = []
    for name in (None, *TEMPLATES):
        for conversation in CONVERSATIONS:
            for tools in (None, TOOLS) if name == "tools as JSON" else (None,):
                for prompt in (True, False):
                    case = {
                        "template": name,
                        "conversation": conversation,
                        "add_generation_prompt": prompt,
                        "tools": tools is not None,
                    }
                    cases.append(case | _rendered(tokenizer, name, conversation, prompt, tools))
    return {
        "templates": TEMPLATES,
        "conversations": CONVERSATIONS,
        "tools": TOOLS,
        "cases": cases,
    }


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    name: str | None,
    conversation: str,
    prompt: bool,
    tools: list[dict[str, Any]] | None,
) -> dict[str, str]:
    try:
        text = tokenizer.apply_chat_template(
            CONVERSATIONS[conversation],
            chat_template=None if name is None else TEMPLATES[name],
            add_generation_prompt=prompt,
            tools=tools,
            tokenize=False,
        )
    except (jinja2.TemplateError, TypeError) as error:
        return {"error": str(error)}
    return {"text": text}


def packed(values: dict[str, Any]) -> bytes:
    text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    return gzip.compress(text.encode(), compresslevel=9, mtime=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    made = {
        "tokenizer_byte_level.json.gz": make_byte_level(tokenizer),
        "tokenizer_sentencepiece.json.gz": make_sentencepiece(),
        "chat_templates.json.gz": make_chat(tokenizer),
    }
    differing = 0
    for name, values in made.items():
        path = GOLDEN / name
        if not arguments.check:
            path.write_bytes(packed(values))
        same = json.loads(gzip.decompress(path.read_bytes())) == values
        differing += not same
        print(f"{name}: {len(values['cases'])} cases, {'as stored' if same else 'DIFFERENT'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
