"""The executor that computes with the native runtime: one call without the GIL for each step."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt

from shoal import _native
from shoal.executor.native_program import record_session
from shoal.executor.threads import available_threads
from shoal.model.program import Program
from shoal.request import Request, TokenLogprob
from shoal.scheduler.interface import SampledToken, ScheduledRequest, ScheduledStep, StepResult

MIN_BLOCKS = 2
_NO_SLOT = -1
_NO_LOGPROBS = -1
_ROW_ERRORS = {
    1: "the model's logits are not finite",
    2: "logit_bias and the tokens banned until min_tokens leave no token to choose",
}


@dataclass(slots=True)
class _Tokens:
    """The ragged batch of a step; the arrays are those of StepInput in native/runtime.h."""

    token_ids: array[int]
    query_start_loc: array[int]
    num_computed_tokens: array[int]
    block_tables: array[int]
    block_table_start: array[int]

    @classmethod
    def of(cls, requests: list[ScheduledRequest]) -> _Tokens:
        token_ids, block_tables = array("i"), array("i")
        for scheduled in requests:
            token_ids.fromlist(scheduled.token_ids)
            block_tables.extend(scheduled.block_table)
        return cls(
            token_ids,
            _starts([len(scheduled.token_ids) for scheduled in requests]),
            array("i", [scheduled.num_computed_tokens for scheduled in requests]),
            block_tables,
            _starts([len(scheduled.block_table) for scheduled in requests]),
        )


def _starts(lengths: Iterable[int]) -> array[int]:
    """Where each of some parts in a row begins, and the end of the last."""
    return array("i", list(accumulate(lengths, initial=0)))  # a list is read faster


class _SamplingState(msgspec.Struct, frozen=True, gc=False):
    """What the executor keeps of a request: its state in the runtime, and the logprobs it wants."""

    slot: int
    num_top: int  # _NO_LOGPROBS, or how many alternatives of each new token
    num_prompt_top: int  # the same for the tokens of its prompt


@dataclass(slots=True)
class _WantedRows:
    """The rows of a step that need logits; the lists are the arrays of LogitsInput in
    native/runtime.h, but for the requests that the rows belong to."""

    request_ids: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    num_top: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        requests: list[ScheduledRequest],
        states: list[_SamplingState],
        query_start_loc: array[int],
    ) -> _WantedRows:
        scores_prompts = any(state.num_prompt_top != _NO_LOGPROBS for state in states)
        if not scores_prompts and all(scheduled.sample for scheduled in requests):
            # Nearly always: each request wants its last row.
            return cls(
                [scheduled.request.request_id for scheduled in requests],
                [end - 1 for end in query_start_loc[1:]],
                [state.slot for state in states],
                [0] * len(states),
                [state.num_top for state in states],
            )
        wanted = cls()
        for i, (scheduled, state) in enumerate(zip(requests, states, strict=True)):
            if state.num_prompt_top != _NO_LOGPROBS:
                wanted._add_scored(scheduled, query_start_loc[i], state.num_prompt_top)
            if scheduled.sample:
                last_row = query_start_loc[i + 1] - 1
                wanted._add(scheduled, last_row, state.slot, 0, state.num_top)
        return wanted

    def _add_scored(self, scheduled: ScheduledRequest, first_row: int, num_top: int) -> None:
        """Each row scores the prompt token that follows it, if there is one."""
        start = scheduled.num_computed_tokens + 1
        targets = scheduled.request.prompt_token_ids[start : start + len(scheduled.token_ids)]
        for row, target in enumerate(targets, first_row):
            self._add(scheduled, row, _NO_SLOT, target, num_top)

    def _add(
        self, scheduled: ScheduledRequest, row: int, slot: int, target: int, num_top: int
    ) -> None:
        self.request_ids.append(scheduled.request.request_id)
        self.rows.append(row)
        self.slots.append(slot)
        self.targets.append(target)
        self.num_top.append(num_top)


class NativeExecutor:
    """Runs a program on the CPU; implements `shoal.executor.interface.Executor`.

    `kv_cache_bytes` of address space are reserved at once and become memory as blocks are used.
    Token ids from `num_valid_tokens` up are padding of the vocabulary and are never chosen. `isa`
    names the instruction set; None takes the environment variable SHOAL_ISA or the best available.
    portable and avx2 give the same bits, avx512 and amx each their own.

    Raises:
        ValueError: the program can't run, `kv_cache_bytes` holds too few blocks, or `isa` is not
            supported here.
    """

    def __init__(
        self,
        program: Program,
        *,
        kv_cache_bytes: int,
        num_valid_tokens: int,
        num_threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        self.isa = isa or _native.default_isa()
        self.num_threads = available_threads() if num_threads is None else num_threads
        self._session = record_session(program, self.isa)
        self.block_bytes = self._session.block_bytes
        self.num_blocks = kv_cache_bytes // self.block_bytes
        if self.num_blocks < MIN_BLOCKS:
            raise ValueError(
                f"a KV cache of {kv_cache_bytes} bytes holds {self.num_blocks} blocks of "
                f"{self.block_bytes} bytes; at least {MIN_BLOCKS} blocks are needed"
            )
        kv_cache = _allocate(self.num_blocks * self.block_bytes)
        self._session.start(kv_cache, num_valid_tokens, self.num_threads)
        self._num_valid_tokens = num_valid_tokens
        self._states: dict[str, _SamplingState] = {}  # by request id
        self._free_slots: list[int] = []

    def execute(self, step: ScheduledStep) -> StepResult:
        """Compute one step: one ragged forward pass, then sampling.

        A request whose sampling parameters name a token outside the vocabulary, or whose logits are
        not finite, is reported in `errors`; the others are unharmed.

        Raises:
            ValueError: the step names a block, token or position that does not exist. Nothing was
                computed then.
        """
        result = StepResult()
        self._drop(step.finished_request_ids)
        requests, states = self._with_states(step.requests, result)
        if not requests:
            return result
        tokens = _Tokens.of(requests)
        wanted = _WantedRows.of(requests, states, tokens.query_start_loc)
        status, token_ids, logprobs, top_ids, top_logprobs = self._session.execute(
            tokens.token_ids,
            tokens.query_start_loc,
            tokens.num_computed_tokens,
            tokens.block_tables,
            tokens.block_table_start,
            array("i", wanted.rows),
            array("i", wanted.slots),
            array("i", wanted.targets),
            array("i", wanted.num_top),
        )
        entries: Iterable[TokenLogprob | None] = repeat(None)
        if max(wanted.num_top, default=_NO_LOGPROBS) != _NO_LOGPROBS:
            entries = _entries(token_ids, logprobs, top_ids, top_logprobs, wanted.num_top)
        _collect(wanted, status.tolist(), token_ids.tolist(), entries, result)
        return result

    def logits(
        self, step: ScheduledStep, *, all_rows: bool = False
    ) -> dict[str, npt.NDArray[np.float32]]:
        """Compute `step` without sampling; returns logits [rows, vocab_size] by request id.

        The rows are the last one of each request with `sample`, or with `all_rows` every row of
        every request.
        """
        tokens = _Tokens.of(step.requests)
        rows = array("i")
        owners: dict[str, slice] = {}
        for i, scheduled in enumerate(step.requests):
            first, end = tokens.query_start_loc[i], tokens.query_start_loc[i + 1]
            if all_rows or scheduled.sample:
                wanted = range(first if all_rows else end - 1, end)
                owner = slice(len(rows), len(rows) + len(wanted))
                owners[scheduled.request.request_id] = owner
                rows.extend(wanted)
        logits = self._session.compute_logits(
            tokens.token_ids,
            tokens.query_start_loc,
            tokens.num_computed_tokens,
            tokens.block_tables,
            tokens.block_table_start,
            rows,
        )
        return {request_id: logits[owner] for request_id, owner in owners.items()}

    def close(self) -> None:
        """Stop the threads and release the memory. Any later step raises RuntimeError."""
        self._session.close()
        self._states.clear()

    def _with_states(
        self, requests: list[ScheduledRequest], result: StepResult
    ) -> tuple[list[ScheduledRequest], list[_SamplingState]]:
        """The requests that can be sampled, those that are new too, and their states."""
        known = self._states
        states = [known.get(scheduled.request.request_id) for scheduled in requests]
        if None in states:
            for scheduled in requests:
                if scheduled.request.request_id not in known:
                    self._register(scheduled.request, result)
            requests = [one for one in requests if one.request.request_id in known]
            states = [known.get(scheduled.request.request_id) for scheduled in requests]
        return requests, cast("list[_SamplingState]", states)

    def _register(self, request: Request, result: StepResult) -> None:
        """Makes the sampling state of a request that is new, unless its parameters are bad."""
        slot = self._free_slots.pop() if self._free_slots else len(self._states)
        try:
            self._session.set_slot(
                slot,
                self._settings(request),
                array("i", request.prompt_token_ids),
                array("i", request.output_token_ids),
            )
        except ValueError as error:
            self._free_slots.append(slot)
            result.errors[request.request_id] = str(error)
            return
        params = request.sampling_params
        self._states[request.request_id] = _SamplingState(
            slot,
            _NO_LOGPROBS if params.logprobs is None else params.logprobs,
            _NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs,
        )

    def _settings(self, request: Request) -> _native.SamplingSettings:
        params = request.sampling_params
        return _native.SamplingSettings(
            seed=request.seed % 2**64,
            sample_index=request.sample_index,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            min_tokens=params.min_tokens,
            end_token_ids=self._end_token_ids(request),
            logit_bias=list(params.logit_bias.items()),
        )

    def _end_token_ids(self, request: Request) -> list[int]:
        """The tokens that would end the request; those past the vocabulary can't be chosen."""
        params = request.sampling_params
        ids = {*params.stop_token_ids, *(() if params.ignore_eos else request.eos_token_ids)}
        return sorted(token_id for token_id in ids if 0 <= token_id < self._num_valid_tokens)

    def _drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                self._session.clear_slot(state.slot)
                self._free_slots.append(state.slot)


def _allocate(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeroed memory, aligned to pages, that is claimed from the system as it is touched.

    Private, since systems as a rule give huge pages to private memory alone. Keys and values of a
    step lie all over the pool: with small pages a step of 32 rows takes 10 % longer.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _entries(
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    top_ids: npt.NDArray[np.int32],
    top_logprobs: npt.NDArray[np.float32],
    num_top: Sequence[int],
) -> list[TokenLogprob | None]:
    """The log-probabilities of the rows; None where they weren't asked for."""
    rows = zip(
        token_ids.tolist(),
        logprobs.tolist(),
        top_ids.tolist(),
        top_logprobs.tolist(),
        num_top,
        strict=True,
    )
    return [
        TokenLogprob(token_id, logprob, list(zip(ids[:count], values[:count], strict=True)))
        if count > 0
        else (None if count == _NO_LOGPROBS else TokenLogprob(token_id, logprob))
        for token_id, logprob, ids, values, count in rows
    ]


def _collect(
    wanted: _WantedRows,
    status: list[int],
    token_ids: list[int],
    entries: Iterable[TokenLogprob | None],
    result: StepResult,
) -> None:
    """Sorts the rows' outcomes by request; a row that failed fails its request."""
    if not any(status) and _NO_SLOT not in wanted.slots:
        sampled = map(SampledToken, token_ids, entries)
        result.sampled = dict(zip(wanted.request_ids, sampled, strict=True))
        return
    rows = zip(wanted.request_ids, wanted.slots, status, token_ids, entries, strict=False)
    for request_id, slot, row_status, token_id, entry in rows:
        if row_status != 0:
            result.errors[request_id] = _ROW_ERRORS[row_status]
        elif slot != _NO_SLOT:
            result.sampled[request_id] = SampledToken(token_id, entry)
        elif entry is not None:
            result.prompt_logprobs.setdefault(request_id, []).append(entry)
    for request_id in result.errors:
        result.sampled.pop(request_id, None)
        result.prompt_logprobs.pop(request_id, None)
