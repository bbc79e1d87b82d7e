"""Builds an engine for a model file: its program, an executor over it, and a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.config import BLOCK_SIZE, ConfigError, EngineConfig
from shoal.engine.core import EngineCore, EngineObserver
from shoal.engine.inputs import ModelLimits
from shoal.engine.messages import EngineInfo
from shoal.engine.trace import StepTrace
from shoal.model.errors import ModelFileError
from shoal.scheduler import create_scheduler
from shoal.scheduler.limits import LengthLimits

# Libraries that take long to import are imported by the functions that need them, for a server has
# only one half of this module in each of its processes.
# ruff: noqa: PLC0415

if TYPE_CHECKING:
    from shoal.model.chat import ChatTemplate
    from shoal.model.loader import ModelFile
    from shoal.model.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextInterface:
    """The parts of a model file that turn text into token ids and back."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    eos_token_ids: tuple[int, ...]


def load_text_interface(model: ModelFile) -> TextInterface:
    """Read tokenizer and chat template.

    Raises:
        ModelFileError: they are damaged or not supported.
    """
    from shoal.model.chat import ChatTemplate, ChatTemplateError
    from shoal.model.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_gguf(model.metadata)
    try:
        chat_template = ChatTemplate.from_gguf(model.metadata, tokenizer)
    except ChatTemplateError as error:
        raise ModelFileError(f"the chat template can't be used: {error}") from error
    return TextInterface(tokenizer, chat_template, model.eos_token_ids)


def load_engine(
    config: EngineConfig, model: ModelFile, observers: Sequence[EngineObserver] = ()
) -> tuple[EngineCore, EngineInfo]:
    """An engine that is ready to serve the model; `observers` are told of each step and end.

    Raises:
        ConfigError: a setting contradicts the model or is more than this machine has, or the native
            runtime can't run the model.
    """
    from shoal.executor.native import NativeExecutor

    trace = _open_trace(config)
    max_model_len = _max_model_len(config, model)
    try:
        executor = NativeExecutor(
            model.record_program(max_model_len),
            kv_cache_bytes=config.kv_cache_memory_mib * 2**20,
            num_valid_tokens=model.num_tokens,
            num_threads=config.num_threads,
            isa=config.instruction_set,
        )
    except (MemoryError, OSError, OverflowError) as error:
        raise ConfigError(
            f"there is no memory for the weights and a KV pool of {config.kv_cache_memory_mib} MiB "
            f"(kv_cache_memory_mib): {error}"
        ) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error
    scheduler = create_scheduler(config, executor.num_blocks, max_model_len)
    info = EngineInfo(
        model=model_name(config.model),
        max_model_len=max_model_len,
        vocab_size=model.num_tokens,
        num_blocks=executor.num_blocks,
        block_size=BLOCK_SIZE,
        num_threads=executor.num_threads,
        isa=executor.isa,
    )
    return EngineCore(scheduler, executor, observers=[*observers, *trace]), info


def _open_trace(config: EngineConfig) -> list[StepTrace]:
    if config.trace_file is None:
        return []
    try:
        return [StepTrace(Path(config.trace_file))]
    except OSError as error:
        raise ConfigError(f"trace_file can't be written: {error}") from error


def model_limits(info: EngineInfo, text: TextInterface) -> ModelLimits:
    """What requests are checked against before they reach the engine."""
    return ModelLimits(
        vocab_size=info.vocab_size,
        eos_token_ids=text.eos_token_ids,
        lengths=LengthLimits(
            max_model_len=info.max_model_len, pool_tokens=info.num_blocks * info.block_size
        ),
    )


def model_name(model: str) -> str:
    """The name that users know a model by: an alias or hub name as it is, a file by its name."""
    return Path(model).stem if model.endswith(".gguf") and not model.startswith("hf:") else model


def _max_model_len(config: EngineConfig, model: ModelFile) -> int:
    context_length = model.config.context_length
    if config.max_model_len is None:
        return context_length
    if config.max_model_len > context_length:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, "
            f"the model's context is {context_length} tokens"
        )
    return config.max_model_len
