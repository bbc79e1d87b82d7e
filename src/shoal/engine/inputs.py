"""From a user's question to requests for the scheduler: checked, bounded and seeded."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from shoal.config import EngineConfig
from shoal.request import InvalidParameterError, Request, RequestOptions, SamplingParams
from shoal.scheduler.limits import LengthLimits

DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the loaded model and the KV pool allow."""

    vocab_size: int  # tokens with a text; ids from here on are invalid
    eos_token_ids: tuple[int, ...]
    lengths: LengthLimits


class InputProcessor:
    """Makes the `n` requests of a user's question.

    `max_tokens` is a cap, not a reservation: when prompt and max_tokens together pass the context
    or the KV pool, the answer ends there with finish_reason "length". A prompt that leaves no room
    for a single token is refused.

    Args:
        limits: what the model and the pool allow.
        config: the engine's; its time limits hold for every request, its seed makes those
            repeatable that are drawn for questions without one.
    """

    def __init__(self, limits: ModelLimits, config: EngineConfig) -> None:
        self._limits = limits
        self._config = config
        self._random = random.Random(config.seed)

    def process(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        arrival_time: float,
    ) -> list[Request]:
        """The requests of a question, one for each sample, told apart by their `sample_index`.

        All samples share the seed; the executor's random numbers depend on the sample index too.
        Only the first computes prompt logprobs, for they are the same in all, and only the first
        has a limit on its time in the queue: then the question has been started.

        Raises:
            InvalidParameterError: a token id is outside the vocabulary, or the prompt is empty.
            RequestRejectedError: the prompt is too long for the context or the KV pool.
        """
        self._check_token_ids("prompt", prompt_token_ids)
        self._check_token_ids("logit_bias", params.logit_bias)
        self._check_token_ids("stop_token_ids", params.stop_token_ids)
        if not prompt_token_ids:
            raise InvalidParameterError("prompt", "the prompt must have at least one token")
        self._limits.lengths.check_prompt(len(prompt_token_ids))

        room = self._limits.lengths.max_tokens - len(prompt_token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        max_queue_time = _shorter(options.max_queue_time, self._config.max_queue_time)
        later_params = msgspec.structs.replace(params, prompt_logprobs=None)
        return [
            Request(
                request_id=f"{request_id}/{sample_index}",
                prompt_token_ids=list(prompt_token_ids),
                sampling_params=params if sample_index == 0 else later_params,
                max_tokens=max_tokens,
                seed=seed,
                eos_token_ids=self._limits.eos_token_ids,
                sample_index=sample_index,
                priority=options.priority,
                arrival_time=arrival_time,
                cache_scope=self._cache_scope(request_id, params, options),
                max_queue_time=max_queue_time if sample_index == 0 else None,
                max_total_time=_shorter(options.max_total_time, self._config.max_total_time),
                client_request_id=options.client_request_id,
            )
            for sample_index in range(params.n)
        ]

    def _cache_scope(
        self, request_id: str, params: SamplingParams, options: RequestOptions
    ) -> tuple[str, str] | None:
        """Who shares the blocks of a question: those with its salt, or at least its samples."""
        if self._config.enable_prefix_caching and options.use_prefix_cache:
            return ("salt", options.cache_salt)
        return ("request", request_id) if params.n > 1 else None

    def _check_token_ids(self, parameter: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if not 0 <= token_id < self._limits.vocab_size:
                raise InvalidParameterError(
                    parameter,
                    f"{parameter} has token id {token_id}, "
                    f"the vocabulary has ids 0 to {self._limits.vocab_size - 1}",
                )


def _shorter(one: float | None, other: float | None) -> float | None:
    return min((limit for limit in (one, other) if limit is not None), default=None)
