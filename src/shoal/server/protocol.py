"""Request bodies: what the API accepts, what it refuses, and how it becomes SamplingParams.

Types are strict: `"true"` is not a boolean and `1.0` is not an integer. A parameter that Shoal
doesn't know is refused. A parameter of OpenAI's API that Shoal doesn't implement is accepted only
with a value that changes nothing (`NEUTRAL_VALUES`). `user`, `metadata`, `safety_identifier`,
`prompt_cache_key`, `service_tier` and `parallel_tool_calls` never change an answer here, so they
are accepted. `null` always means "not given".
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from shoal.request import MAX_LOGPROBS, RequestOptions, SamplingParams
from shoal.server.errors import ApiError, bad_request, clip

MAX_PROMPTS = 512
MAX_CHOICES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_MESSAGES = 4096
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI's completions endpoint has it

Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Count = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
StopStrings = Annotated[list[str], msgspec.Meta(max_length=MAX_STOP_STRINGS)]
TokenIds = Annotated[list[Count], msgspec.Meta(max_length=MAX_STOP_TOKEN_IDS)]
Prompt = str | list[str | Int64 | list[Int64]]

# Body fields that mean exactly what the sampling parameter of the same name means.
SHARED_FIELDS = (
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
)

# Body fields that mean exactly what the request option of the same name means.
OPTION_FIELDS = (
    "priority",
    "cache_salt",
    "use_prefix_cache",
    "max_queue_time",
    "max_total_time",
)

# OpenAI parameters that aren't implemented, with the values that ask for nothing.
NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "function_call": (None, "none"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "store": (None, False),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "verbosity": (None,),
    "web_search_options": (None,),
}


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request body; an unknown field is an error."""


class StreamOptions(Body, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None


class GenerationBody(Body, kw_only=True):
    """The parameters that both generation endpoints share."""

    unsupported: ClassVar[tuple[str, ...]] = ()

    model: str | None = None
    n: Count | None = None
    temperature: float | None = None
    top_k: Count | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Count, float] | None = None
    seed: Int64 | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    stop: str | StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Count | None = None
    priority: Count | None = None
    cache_salt: str | None = None
    use_prefix_cache: bool | None = None
    max_queue_time: float | None = None
    max_total_time: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Accepted, and without influence on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Any = None

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what the types can't express.

        Raises:
            ApiError: a parameter isn't supported, or contradicts another.
        """
        for name in self.unsupported:
            if getattr(self, name) not in NEUTRAL_VALUES[name]:
                raise bad_request(
                    f"The parameter '{name}' is not supported with this value; leave it out.",
                    name,
                    "unsupported_parameter",
                )
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "'stream_options' is only allowed with 'stream': true.", "stream_options"
            )

    def request_options(self) -> RequestOptions:
        """How the engine is to treat the request.

        Raises:
            InvalidParameterError: a value is outside its range.
        """
        given: dict[str, Any] = {
            name: value for name in OPTION_FIELDS if (value := getattr(self, name)) is not None
        }
        return RequestOptions(**given)

    def sampling_params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The sampling parameters.

        Raises:
            InvalidParameterError: a value is outside its range.
        """
        given: dict[str, Any] = {
            name: value for name in SHARED_FIELDS if (value := getattr(self, name)) is not None
        }
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **given,
        )


class CompletionBody(GenerationBody, kw_only=True):
    """The body of POST /v1/completions."""

    unsupported: ClassVar[tuple[str, ...]] = ("store", "suffix")

    prompt: Prompt
    echo: bool | None = None
    logprobs: Count | None = None
    best_of: Count | None = None
    suffix: Any = None

    def check(self) -> None:
        """Refuse what the types can't express."""
        GenerationBody.check(self)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise bad_request(
                f"best_of is {self.best_of}; only best_of equal to n ({self.n or 1}) is supported.",
                "best_of",
                "unsupported_parameter",
            )

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list: of texts or of token ids.

        Raises:
            ApiError: the list is empty, too long or mixes kinds, or a prompt is empty.
        """
        prompt = self.prompt
        prompts: list[Any] = [prompt] if isinstance(prompt, str) else prompt
        if prompts and all(isinstance(item, int) for item in prompts):
            prompts = [prompts]
        if not prompts or any(not item for item in prompts if not isinstance(item, int)):
            raise bad_request("prompt must not be empty.", "prompt", "empty_prompt")
        if len({type(item) for item in prompts}) > 1:
            raise bad_request(
                "prompt must be a string, a list of strings, a list of token ids or a list of "
                "lists of token ids; it mixes them.",
                "prompt",
            )
        if len(prompts) > MAX_PROMPTS:
            raise bad_request(
                f"prompt has {len(prompts)} items, the limit is {MAX_PROMPTS}.", "prompt"
            )
        if (choices := len(prompts) * (self.n or 1)) > MAX_CHOICES:
            raise bad_request(
                f"n times the number of prompts is {choices}, the limit is {MAX_CHOICES}.", "n"
            )
        return prompts

    def to_sampling_params(self) -> SamplingParams:
        """The sampling parameters; without max_tokens 16 tokens are generated."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self.sampling_params(max_tokens=max_tokens, logprobs=self.logprobs)


class TextPart(Body, tag_field="type", tag="text"):
    """A part of a message's content; text is the only kind."""

    text: str


class Message(Body, kw_only=True):
    """One message of a chat.

    The fields after `name` only take `null`: clients send them back with an assistant's message.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    tool_calls: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None

    def for_template(self) -> dict[str, str]:
        """The message as chat templates know it: parts are joined by newlines.

        OpenAI renamed "system" to "developer"; templates only know the old name.
        """
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": content}
        if self.name is not None:
            message["name"] = self.name
        return message


class ChatBody(GenerationBody, kw_only=True):
    """The body of POST /v1/chat/completions."""

    unsupported: ClassVar[tuple[str, ...]] = tuple(n for n in NEUTRAL_VALUES if n != "suffix")

    messages: Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    max_completion_tokens: Count | None = None
    parallel_tool_calls: bool | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    def check(self) -> None:
        """Refuse what the types can't express."""
        GenerationBody.check(self)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs 'logprobs': true.", "top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise bad_request(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {self.top_logprobs}.",
                "top_logprobs",
            )
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise bad_request(
                f"max_completion_tokens must be at least 1, got {self.max_completion_tokens}.",
                "max_completion_tokens",
            )
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise bad_request(
                "max_tokens and max_completion_tokens differ; give one of them.",
                "max_completion_tokens",
            )

    def to_sampling_params(self) -> SamplingParams:
        """The sampling parameters; without a limit the answer may fill the context."""
        max_tokens = self.max_tokens
        if max_tokens is None:
            max_tokens = self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self.sampling_params(max_tokens=max_tokens, logprobs=logprobs)


class TokenizeBody(Body, kw_only=True):
    """The body of POST /tokenize: a text, or messages to be put through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: (
        Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_MESSAGES)] | None
    ) = None
    add_special_tokens: bool = True  # of a text; a chat template brings its own
    add_generation_prompt: bool = True  # of messages

    def check(self) -> None:
        """Refuse what the types can't express."""
        if (self.prompt is None) == (self.messages is None):
            raise bad_request("Give one of 'prompt' and 'messages'.", "prompt")


class DetokenizeBody(Body, kw_only=True):
    """The body of POST /detokenize."""

    tokens: list[Int64]
    model: str | None = None
    skip_special_tokens: bool = False

    def check(self) -> None:
        """Nothing that the types can't express."""


AnyBody = CompletionBody | ChatBody | TokenizeBody | DetokenizeBody
B = TypeVar("B", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `([^`]*)`")
_MISSING_FIELD = re.compile(r"Object missing required field `([^`]*)`")


def decode(decoder: msgspec.json.Decoder[B], body: bytes) -> B:
    """Decode and check a body.

    Raises:
        ApiError: 400 naming the parameter that is to blame.
    """
    try:
        decoded = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("The body is nested too deeply.", code="invalid_json") from None
    decoded.check()
    return decoded


def _type_error(message: str) -> ApiError:
    """Turn the decoder's message (`Expected ... - at `$.path``) into an error object."""
    path = _PATH.search(message)
    where = path.group(1).replace("[...]", "") if path else ""
    what = _PATH.sub("", message)
    prefix = f"{where}." if where else ""
    if unknown := _UNKNOWN_FIELD.search(message):
        name = clip(prefix + unknown.group(1), 80)
        return bad_request(f"Unknown parameter: '{name}'.", name, "unknown_parameter")
    if missing := _MISSING_FIELD.search(message):
        name = prefix + missing.group(1)
        return bad_request(
            f"Missing required parameter: '{name}'.", name, "missing_required_parameter"
        )
    if not where:
        return bad_request(f"The body is not valid: {what}.", code="invalid_type")
    return bad_request(f"Invalid value for '{where}': {what}.", where, "invalid_type")
