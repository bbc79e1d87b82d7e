"""The vocabulary of a request: what a user asks for, and what the engine remembers of it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

import msgspec

MAX_LOGPROBS = 20
MAX_PARALLEL_SAMPLES = 128
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_STOP_STRING_LENGTH = 1024  # characters
MAX_PRIORITY = 1000
MAX_CACHE_SALT_LENGTH = 256  # characters
MIN_TIME_LIMIT, MAX_TIME_LIMIT = 1e-3, 1e6  # seconds
MIN_TEMPERATURE = 1e-3  # above 0: below it 1 / temperature leaves float32


class FinishReason(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"  # a stop token, a stop string or an end-of-sequence token
    LENGTH = "length"  # max_tokens or the context was reached
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # the engine failed to compute it


class RequestStatus(enum.Enum):
    """Where a request stands in the scheduler."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class InvalidParameterError(ValueError):
    """A request parameter is outside its range; `parameter` names it for the error object."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def _require(condition: bool, parameter: str, message: str) -> None:
    if not condition:
        raise InvalidParameterError(parameter, message)


def _require_range(parameter: str, value: float, low: float, high: float) -> None:
    _require(
        math.isfinite(value) and low <= value <= high,
        parameter,
        f"{parameter} must be between {low:g} and {high:g}, got {value}",
    )


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the tokens of one request are chosen and when it stops.

    Reported logprobs are the log-softmax of the model's raw logits, before penalties, bias and
    temperature. `temperature=0` is greedy. Penalties count the prompt and the output
    (`repetition_penalty`) or the output alone (`presence_penalty`, `frequency_penalty`).

    Raises:
        InvalidParameterError: a value is outside its range; the message names value and limit.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0: no limit
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None  # None: the engine draws one
    max_tokens: int | None = None  # None: up to the context's end
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives for each output token; 0: the chosen one only
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _require_range("n", self.n, 1, MAX_PARALLEL_SAMPLES)
        if self.temperature != 0.0:
            _require_range("temperature", self.temperature, MIN_TEMPERATURE, 100.0)
        _require(self.top_k >= 0, "top_k", f"top_k must be 0 (no limit) or more, got {self.top_k}")
        _require(0.0 < self.top_p <= 1.0, "top_p", f"top_p must be in (0, 1], got {self.top_p}")
        _require_range("min_p", self.min_p, 0.0, 1.0)
        _require_range("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _require_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _require_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _require(
            len(self.logit_bias) <= MAX_LOGIT_BIAS_ENTRIES,
            "logit_bias",
            f"logit_bias has {len(self.logit_bias)} entries, the limit is {MAX_LOGIT_BIAS_ENTRIES}",
        )
        for token_id, bias in self.logit_bias.items():
            _require(token_id >= 0, "logit_bias", f"logit_bias has a negative token id {token_id}")
            _require_range("logit_bias", bias, -100.0, 100.0)
        if self.seed is not None:
            _require(
                -(2**63) <= self.seed < 2**63, "seed", f"seed must fit 64 bits, got {self.seed}"
            )
        if self.max_tokens is not None:
            _require(
                self.max_tokens >= 1,
                "max_tokens",
                f"max_tokens must be at least 1, got {self.max_tokens}",
            )
            _require(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}",
            )
        _require(
            self.min_tokens >= 0, "min_tokens", f"min_tokens must be >= 0, got {self.min_tokens}"
        )
        _require(all(self.stop), "stop", "stop must not contain an empty string")
        longest = max(map(len, self.stop), default=0)
        _require(
            longest <= MAX_STOP_STRING_LENGTH,
            "stop",
            f"a stop string has {longest} characters, the limit is {MAX_STOP_STRING_LENGTH}",
        )
        for name, count in (
            ("logprobs", self.logprobs),
            ("prompt_logprobs", self.prompt_logprobs),
        ):
            if count is not None:
                _require_range(name, count, 0, MAX_LOGPROBS)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, so that no random number is drawn."""
        return self.temperature == 0.0


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine treats one request; without influence on its answer, but for its end.

    Raises:
        InvalidParameterError: a value is outside its range.
    """

    priority: int = 0  # smaller is sooner; ties by arrival
    cache_salt: str = ""  # only requests with the same salt share cached blocks
    use_prefix_cache: bool = True
    max_queue_time: float | None = None  # seconds; can only shorten the engine's own limit
    max_total_time: float | None = None  # seconds; likewise
    client_request_id: str = ""  # what its client calls it, for the step trace

    def __post_init__(self) -> None:
        for name, kind in (
            ("priority", int),
            ("cache_salt", str),
            ("use_prefix_cache", bool),
            ("client_request_id", str),
        ):
            value = getattr(self, name)
            _require(
                type(value) is kind, name, f"{name} must be {kind.__name__}, got {value!r:.80}"
            )
        _require_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        _require(
            len(self.cache_salt) <= MAX_CACHE_SALT_LENGTH,
            "cache_salt",
            f"cache_salt has {len(self.cache_salt)} characters, "
            f"the limit is {MAX_CACHE_SALT_LENGTH}",
        )
        for name in ("max_queue_time", "max_total_time"):
            seconds = getattr(self, name)
            if seconds is not None:
                _require_range(name, seconds, MIN_TIME_LIMIT, MAX_TIME_LIMIT)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log-probability of one token and its most likely alternatives (ids, natural log)."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []  # the `logprobs` most likely tokens, best first


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine: the immutable question and the mutable progress.

    A user's request with `n` samples becomes `n` of these, told apart by `sample_index`.
    Times are seconds on the scheduler's injected clock.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_tokens: int  # resolved: never passes the context
    seed: int  # resolved: sampling_params.seed or one drawn by the engine
    eos_token_ids: tuple[int, ...] = ()
    sample_index: int = 0
    priority: int = 0  # smaller is sooner; ties by arrival
    arrival_time: float = 0.0
    cache_scope: tuple[str, str] | None = None  # who shares its blocks; None: nobody
    max_queue_time: float | None = None  # seconds from arrival_time; resolved
    max_total_time: float | None = None  # likewise
    client_request_id: str = ""  # what its client calls it
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_prompt_logprobs: int = 0  # delivered so far; a recomputation brings them again
    num_preemptions: int = 0
    num_bypasses: int = 0  # later requests admitted past this one since it last waited
    late_since: float | None = None  # when it passed its max_queue_time, if it then waits on
    first_scheduled_time: float | None = None
    first_token_time: float | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: the prompt and the output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that are known and not computed: one for a request that decodes."""
        known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return known - self.num_computed_tokens

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Token ids at positions `start` to `stop` (exclusive) of prompt followed by output."""
        num_prompt = len(self.prompt_token_ids)
        if stop <= num_prompt:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : stop - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt]
