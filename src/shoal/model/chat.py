"""Chat messages to the prompt that a model was trained on, by the template in its file.

A template is a Jinja program by a stranger, so it runs in a sandbox, and every way in which it can
fail is a `ChatTemplateError`. What it may use is what HF transformers offers to it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shoal.model.errors import ModelFileError
from shoal.model.tokenizer import Tokenizer

TEMPLATE_KEY: Final = "tokenizer.chat_template"

# Far above what templates need, and low enough that a rendering ends within a second.
MAX_RANGE_STEPS: Final = 100_000  # of all range() in one rendering together
MAX_REPEATED_LENGTH: Final = 1_000_000  # of a string or list made by "*"
MAX_EXPONENT: Final = 64

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The chat template refuses the messages, or fails; the message is for the user."""


class ChatTemplate:
    """A compiled chat template. Safe to share between threads."""

    __slots__ = ("_bos_token", "_eos_token", "_template")

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Compiles `source`; raises `ChatTemplateError` if it is no Jinja template.

        `bos_token` and `eos_token` are texts, empty where the model has no such token.
        """
        self._bos_token = bos_token
        self._eos_token = eos_token
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"The model's chat template is malformed: {error}") from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], tokenizer: Tokenizer) -> ChatTemplate | None:
        """The template of a GGUF file; `None` if it has none, as files of base models.

        Raises `ModelFileError` if the entry is no string, `ChatTemplateError` if it is malformed.
        """
        source = metadata.get(TEMPLATE_KEY)
        if source is None:
            return None
        if not isinstance(source, str):
            raise ModelFileError(f"{TEMPLATE_KEY} must be a string, got {type(source).__name__}.")
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        return cls(
            source,
            bos_token="" if bos is None else tokenizer.token_text(bos),
            eos_token="" if eos is None else tokenizer.token_text(eos),
        )

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt: special tokens are written out, so encode it without adding any.

        `messages` are as in OpenAI's API: role, content and what else the template reads. A content
        that is a list of text parts is joined by newlines, and entries that are `None` count as
        missing. `tools` are JSON schemas, which only some templates read. Raises
        `ChatTemplateError`, with the template's own message where it gives one.
        """
        plain = [_for_template(index, message) for index, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=plain,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                bos_token=self._bos_token,
                eos_token=self._eos_token,
                range=_BoundedRange(),
            )
        except _RefusedError as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # whatever the template does wrong
            reason = str(error) or type(error).__name__
            raise ChatTemplateError(f"The model's chat template failed: {reason}") from error


class _RefusedError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _BoundedRange:
    """`range` for one rendering. Nested loops end too, as each start of one counts its steps."""

    def __init__(self) -> None:
        self._steps_left = MAX_RANGE_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = range(*bounds)
        # Not len(), which fails for huge ranges.
        if steps and (steps[-1] - steps[0]) // steps.step + 1 > self._steps_left:
            raise jinja2.TemplateRuntimeError(f"its loops take more than {MAX_RANGE_STEPS} steps.")
        self._steps_left -= len(steps)
        return steps


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds the operators that make much out of little."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" and abs(right) > MAX_EXPONENT:
            raise jinja2.TemplateRuntimeError(f"it raises to a power above {MAX_EXPONENT}.")
        if operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and (
                    len(repeated) * times > MAX_REPEATED_LENGTH
                ):
                    raise jinja2.TemplateRuntimeError(
                        f"it repeats to a length above {MAX_REPEATED_LENGTH}."
                    )
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; it renders as it is."""

    tags = {"generation"}  # noqa: RUF012 - the type that jinja2 declares

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _for_template(index: int, message: Message) -> dict[str, Any]:
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        for position, part in enumerate(content):
            if part.get("type") != "text":
                raise ChatTemplateError(
                    f"messages[{index}].content[{position}] is of type {part.get('type')!r}; "
                    "only 'text' is supported."
                )
        plain["content"] = "\n".join(part["text"] for part in content)
    return plain
