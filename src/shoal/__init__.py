"""Shoal: an LLM inference server in which batching is a choice that you can see and measure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.config import EngineConfig
from shoal.request import RequestOptions, SamplingParams

if TYPE_CHECKING:
    from shoal.llm import LLM, GenerationOutput

__all__ = ["LLM", "EngineConfig", "GenerationOutput", "RequestOptions", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import the engine when it is first asked for, so that `import shoal` stays fast."""
    if name in {"LLM", "GenerationOutput"}:
        from shoal import llm  # noqa: PLC0415 - slow

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
