"""What a step's result means for one request: the same for every batching strategy."""

from __future__ import annotations

from shoal.request import FinishReason, Request, TokenLogprob
from shoal.scheduler.interface import (
    RequestOutput,
    RequestProgress,
    RequestTimes,
    SampledToken,
    ScheduledRequest,
    StepResult,
)


def advance(
    scheduled: ScheduledRequest, result: StepResult, max_request_tokens: int, now: float
) -> RequestOutput:
    """Move a request forward by what the step computed for it and say what came of it.

    An error, or a missing token, ends this request alone with `FinishReason.ERROR`.
    """
    request = scheduled.request
    request_id = request.request_id
    sampled = result.sampled.get(request_id) if scheduled.sample else None
    if request_id in result.errors or (scheduled.sample and sampled is None):
        return RequestOutput(
            request_id=request_id,
            error=result.errors.get(request_id, "the executor returned no token"),
            finish_reason=FinishReason.ERROR,
        )
    request.num_computed_tokens += len(scheduled.token_ids)
    if sampled is None:
        output = RequestOutput(request_id=request_id)
    else:
        output = _take_token(request, sampled, max_request_tokens, now)
    if result.prompt_logprobs:
        output.prompt_logprobs = _new_prompt_logprobs(scheduled, result)
    return output


def finish_reason_after(request: Request, max_request_tokens: int) -> FinishReason | None:
    """Whether the token that a request got last ends it.

    Stop tokens are looked at before limits, so a stop token on the last permitted place counts as
    a stop. The first `min_tokens` tokens never stop.
    """
    params = request.sampling_params
    output_token_ids = request.output_token_ids
    num_output_tokens = len(output_token_ids)
    if num_output_tokens > params.min_tokens:
        token_id = output_token_ids[-1]
        is_eos = token_id in request.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return FinishReason.STOP
    num_tokens = len(request.prompt_token_ids) + num_output_tokens
    if num_output_tokens >= request.max_tokens or num_tokens >= max_request_tokens:
        return FinishReason.LENGTH
    return None


def times_of(request: Request, finished: float | None = None) -> RequestTimes:
    """The milestones that a request has passed."""
    return RequestTimes(
        arrival=request.arrival_time,
        first_scheduled=request.first_scheduled_time,
        first_token=request.first_token_time,
        finished=finished,
    )


def progress_of(request: Request, is_done: bool) -> RequestProgress:
    """How far a request is."""
    return RequestProgress(
        request_id=request.request_id,
        arrival_time=request.arrival_time,
        priority=request.priority,
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        num_output_tokens=len(request.output_token_ids),
        num_preemptions=request.num_preemptions,
        is_done=is_done,
    )


def _take_token(
    request: Request, sampled: SampledToken, max_request_tokens: int, now: float
) -> RequestOutput:
    token_id = sampled.token_id
    request.output_token_ids.append(token_id)
    reason = finish_reason_after(request, max_request_tokens)
    output = RequestOutput(
        request_id=request.request_id, new_token_ids=[token_id], finish_reason=reason
    )
    if sampled.logprob is not None:
        output.new_logprobs = [sampled.logprob]
    if reason is not None and reason is FinishReason.STOP:  # the name of a member is slow to read
        output.stop_token_id = token_id
    if request.first_token_time is None:
        request.first_token_time = now
        output.num_cached_tokens = request.num_cached_tokens
        output.times = times_of(request)
    return output


def _new_prompt_logprobs(scheduled: ScheduledRequest, result: StepResult) -> list[TokenLogprob]:
    """The step's prompt logprobs without those that were delivered before a preemption."""
    request = scheduled.request
    entries = result.prompt_logprobs.get(request.request_id, [])
    num_known = request.num_prompt_logprobs - scheduled.num_computed_tokens
    if num_known > 0:
        entries = entries[num_known:]
    request.num_prompt_logprobs += len(entries)
    return entries
