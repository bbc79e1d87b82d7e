"""The executor that computes with the native runtime: one call without the GIL for each step."""

from __future__ import annotations

import mmap
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

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
_NO_ROWS: tuple[tuple[()], ...] = ((),) * 5  # its columns
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


_WantedRow = tuple[Request, int, int, int, int]
"""A row that needs logits: whose it is, then its values in the arrays of LogitsInput in
native/runtime.h, which are rows, slots, targets and num_top."""


def _rows_to_score(scheduled: ScheduledRequest, first_row: int, num_top: int) -> list[_WantedRow]:
    """Each row scores the prompt token that follows it, if there is one."""
    start = scheduled.num_computed_tokens + 1
    targets = scheduled.request.prompt_token_ids[start : start + len(scheduled.token_ids)]
    return [
        (scheduled.request, row, _NO_SLOT, target, num_top)
        for row, target in enumerate(targets, first_row)
    ]


class NativeExecutor:
    """Runs a program on the CPU; implements `shoal.executor.interface.Executor`.

    `kv_cache_bytes` of address space are reserved at once and become memory as blocks are used.
    Token ids from `num_valid_tokens` up are padding of the vocabulary and are never chosen. `isa`
    names the instruction set; None takes the environment variable SHOAL_ISA or the best available.
    All but amx give the same bits.

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
        self._slots: dict[str, int] = {}  # request id: its sampling state in the runtime
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
        requests = self._with_slots(step.requests, result)
        if not requests:
            return result
        tokens = _Tokens.of(requests)
        wanted = self._wanted_rows(requests, tokens.query_start_loc)
        owners, rows, slots, targets, num_top = zip(*wanted, strict=True) if wanted else _NO_ROWS
        status, token_ids, logprobs, top_ids, top_logprobs = self._session.execute(
            tokens.token_ids,
            tokens.query_start_loc,
            tokens.num_computed_tokens,
            tokens.block_tables,
            tokens.block_table_start,
            array("i", rows),
            array("i", slots),
            array("i", targets),
            array("i", num_top),
        )
        entries: Iterable[TokenLogprob | None] = repeat(None)
        if max(num_top, default=_NO_LOGPROBS) != _NO_LOGPROBS:
            entries = _entries(token_ids, logprobs, top_ids, top_logprobs, num_top)
        _collect(
            zip(owners, slots, status.tolist(), token_ids.tolist(), entries, strict=False), result
        )
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
        self._slots.clear()

    def _wanted_rows(
        self, requests: list[ScheduledRequest], query_start_loc: array[int]
    ) -> list[_WantedRow]:
        wanted: list[_WantedRow] = []
        for i, scheduled in enumerate(requests):
            request = scheduled.request
            params = request.sampling_params
            if params.prompt_logprobs is not None:
                wanted += _rows_to_score(scheduled, query_start_loc[i], params.prompt_logprobs)
            if scheduled.sample:
                slot = self._slots[request.request_id]
                num_top = _NO_LOGPROBS if params.logprobs is None else params.logprobs
                wanted.append((request, query_start_loc[i + 1] - 1, slot, 0, num_top))
        return wanted

    def _with_slots(
        self, requests: list[ScheduledRequest], result: StepResult
    ) -> list[ScheduledRequest]:
        """The requests that can be sampled, those that are new too."""
        slots = self._slots
        for scheduled in requests:
            if scheduled.request.request_id not in slots:
                self._register(scheduled.request, result)
        if not result.errors:
            return requests
        return [scheduled for scheduled in requests if scheduled.request.request_id in slots]

    def _register(self, request: Request, result: StepResult) -> None:
        """Makes the sampling state of a request that is new, unless its parameters are bad."""
        slot = self._free_slots.pop() if self._free_slots else len(self._slots)
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
        self._slots[request.request_id] = slot

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
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._session.clear_slot(slot)
                self._free_slots.append(slot)


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
    rows: Iterable[tuple[Request, int, int, int, TokenLogprob | None]], result: StepResult
) -> None:
    """Sorts the rows' outcomes by request; a row that failed fails its request.

    A row is its request and slot, then the status, the token and its log-probability.
    """
    sampled = result.sampled
    for request, slot, status, token_id, entry in rows:
        if status != 0:
            result.errors[request.request_id] = _ROW_ERRORS[status]
        elif slot != _NO_SLOT:
            sampled[request.request_id] = SampledToken(token_id, entry)
        elif entry is not None:
            result.prompt_logprobs.setdefault(request.request_id, []).append(entry)
    for request_id in result.errors:
        sampled.pop(request_id, None)
        result.prompt_logprobs.pop(request_id, None)
