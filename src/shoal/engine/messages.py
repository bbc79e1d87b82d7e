"""What the engine's process and its client say to each other, as msgpack."""

from __future__ import annotations

import msgspec

from shoal.request import FinishReason, Request
from shoal.scheduler.interface import BatchView, RequestOutput, SchedulerStats

COMMANDS_SOCKET = "commands"
EVENTS_SOCKET = "events"
"""Names of the sockets, in a directory of theirs."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine has loaded, and its limits."""

    model: str  # the name that users know
    max_model_len: int
    vocab_size: int  # tokens of the tokenizer
    num_blocks: int
    block_size: int
    num_threads: int
    isa: str  # the instruction set in use


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """Queue the samples of the user's request `request_id`: all or none."""

    request_id: str
    requests: list[Request]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """End requests, by the engine's ids; unknown ones are skipped."""

    request_ids: list[str]
    reason: FinishReason


class EndInput(msgspec.Struct, frozen=True, tag="end_input"):
    """No request comes any more: a batch need not wait to fill."""


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache"):
    """Forget all cached blocks; `Advanced.num_blocks_reset` answers."""


class ViewBatch(msgspec.Struct, frozen=True, tag="view_batch"):
    """Say who runs and who waits; `Advanced.batch` answers."""

    max_waiting: int  # most of those who wait


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End the process."""


Command = AddRequests | AbortRequests | EndInput | ResetPrefixCache | ViewBatch | Stop


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The model is loaded; commands are being read."""

    info: EngineInfo
    stats: SchedulerStats


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed"):
    """The process ends without having served; `message` is one line."""

    message: str


class Refused(msgspec.Struct, frozen=True, omit_defaults=True):
    """A user's request was not queued: it never fits, or the queue is full (`retry_after`)."""

    request_id: str
    message: str
    retry_after: float | None = None  # seconds


class Advanced(msgspec.Struct, tag="advanced", omit_defaults=True):
    """Everything that one turn of the loop brought: commands taken in and a step."""

    stats: SchedulerStats
    outputs: list[RequestOutput] = []
    refused: list[Refused] = []
    num_blocks_reset: list[int] = []  # an answer for each ResetPrefixCache
    batch: BatchView | None = None  # after the step, if ViewBatch asked


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine can't go on and the process ends."""

    message: str


Event = Started | StartFailed | Advanced | Died
