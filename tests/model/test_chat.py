"""Chat templates; tests/oracle/make_tokenizer.py makes the golden prompts with HF transformers."""

import datetime
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.model.chat import ChatTemplate, ChatTemplateError
from shoal.model.errors import ModelFileError
from shoal.model.gguf import GGUFFile
from shoal.model.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "oracle" / "golden" / "chat_templates.json.gz"
HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str, messages: list[dict[str, Any]] = HELLO) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages)


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(gzip.decompress(GOLDEN.read_bytes()))
    return values


@pytest.fixture(scope="module")
def model_metadata(model_path: Path) -> Any:
    return GGUFFile.open(model_path).metadata


def test_prompts_equal_those_of_transformers(golden: dict[str, Any], model_metadata: Any) -> None:
    templates = {
        name: ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>")
        for name, source in golden["templates"].items()
    }
    of_model = ChatTemplate.from_gguf(model_metadata, Tokenizer.from_gguf(model_metadata))
    assert of_model is not None
    for case in golden["cases"]:
        template = templates.get(case["template"], of_model)
        messages = golden["conversations"][case["conversation"]]
        options: dict[str, Any] = {
            "add_generation_prompt": case["add_generation_prompt"],
            "tools": golden["tools"] if case["tools"] else None,
        }
        if "error" in case:
            with pytest.raises(ChatTemplateError) as refused:
                template.render(messages, **options)
            assert case["error"] in str(refused.value)
        else:
            assert template.render(messages, **options) == case["text"]


def test_a_file_without_a_template_has_none(model_metadata: Any) -> None:
    tokenizer = Tokenizer.from_gguf(model_metadata)
    bare = {key: value for key, value in model_metadata.items() if "chat_template" not in key}
    assert ChatTemplate.from_gguf(bare, tokenizer) is None
    with pytest.raises(ModelFileError, match=r"tokenizer\.chat_template must be a string, got int"):
        ChatTemplate.from_gguf(bare | {"tokenizer.chat_template": 1}, tokenizer)


def test_the_message_of_raise_exception_is_the_error() -> None:
    with pytest.raises(ChatTemplateError, match=r"^Conversation roles must alternate$"):
        render("{{ raise_exception('Conversation roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ nothing.at_all }}", "'nothing' is undefined"),
        ("{{ 1 + 'a' }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[0].content | no_such_filter }}", "no_such_filter"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_a_failing_template_is_one_error_with_its_reason(source: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ cycler.__init__.__globals__.os }}",
    ],
)
def test_the_sandbox_lets_nothing_out_and_nothing_change(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"unsafe|undefined|no attribute"):
        render(source)
    assert HELLO == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 30) }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ (10 ** 12) * [1] }}",
        "{{ 9 ** 999999999 }}",
    ],
)
def test_what_would_run_for_ever_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"steps|length|power"):
        render(source)


def test_bounded_operators_still_compute() -> None:
    source = "{{ 2 * 3 }} {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ range(5, 0, -2) | list }}"
    assert render(source) == "6 1024 abab [5, 3, 1]"


def test_each_rendering_has_steps_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}ok", "", "")
    assert [template.render(HELLO) for _ in range(3)] == ["ok"] * 3


def test_text_parts_are_joined_by_newlines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_other_parts_are_refused_by_name_and_place() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(ChatTemplateError, match=r"messages\[0\]\.content\[1\].*'image_url'"):
        render("{{ messages[0].content }}", [{"role": "user", "content": parts}])


def test_the_date_can_be_asked_for() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)


def test_a_malformed_template_is_refused_when_it_is_compiled() -> None:
    with pytest.raises(ChatTemplateError, match="malformed"):
        ChatTemplate("{% if %}", "", "")
