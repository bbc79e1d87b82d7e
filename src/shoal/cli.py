"""The command line. Everything heavy is imported inside the command that needs it."""

# ruff: noqa: PLC0415

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from shoal.bench.errors import BenchError
from shoal.config import ConfigError, EngineConfig
from shoal.engine.errors import EngineDeadError, EngineStartError, RequestFailedError
from shoal.model.errors import ModelError
from shoal.request import InvalidParameterError, SamplingParams
from shoal.scheduler.interface import RequestRejectedError
from shoal.server.config import ServerConfig, ServerStartError

RUNTIME_ERROR, USAGE_ERROR = 1, 2
INTERRUPTED = 130  # as shells report SIGINT

USAGE_ERRORS = (CycloptsError, ConfigError, InvalidParameterError)
RUNTIME_ERRORS = (
    ModelError,
    EngineStartError,
    ServerStartError,
    EngineDeadError,
    RequestFailedError,
    RequestRejectedError,
    BenchError,
    OSError,
)

# The fields of the dataclass become flags of the command.
Flat = Parameter(name="*", negative_iterable="")
ENGINE_DEFAULTS = EngineConfig()
SERVER_DEFAULTS = ServerConfig()

app = App(
    name="shoal",
    help="An LLM inference server in which batching is a choice that you can see and measure.",
    version=lambda: f"shoal {version('shoal')}",
    help_format="plaintext",
)
bench = App(name="bench", help="Measure the engine or a server.")
bench.command("shoal.bench.throughput:run", name="throughput", help="Measure the engine alone.")
bench.command("shoal.bench.serve:run", name="serve", help="Put load on a server and measure it.")
bench.command("shoal.bench.compare:run", name="compare", help="Compare the strategies.")
app.command(bench)
app.command("shoal.bench.tune:run", name="tune", help="Find the limits that suit a workload.")


@app.command
def serve(
    model: str | None = None,
    /,
    *,
    engine: Annotated[EngineConfig, Flat] = ENGINE_DEFAULTS,
    server: Annotated[ServerConfig, Flat] = SERVER_DEFAULTS,
) -> None:
    """Serve MODEL over HTTP with OpenAI's API.

    Args:
        model: The same as --model.
    """
    from shoal.server import launcher

    if server.api_key is None and (key := os.environ.get("SHOAL_API_KEY")):
        server = dataclasses.replace(server, api_key=key)
    engine = _with_model(engine, model)
    launcher.serve(engine, server, launcher.bind(server))


@app.command
def run(
    model: str | None = None,
    prompt: str | None = None,
    /,
    *,
    system: str | None = None,
    temperature: float = 0.0,
    max_tokens: int | None = None,
    engine: Annotated[EngineConfig, Flat] = ENGINE_DEFAULTS,
) -> None:
    """Answer PROMPT once, or chat in the terminal when there is none.

    Args:
        model: The same as --model.
        prompt: The question.
        system: What the model is told about its role.
        temperature: How freely the words are chosen; 0 always takes the most likely.
        max_tokens: Most tokens of an answer; what the context holds when not set.
    """
    from shoal import chat_terminal

    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    conversation = chat_terminal.Conversation(params, system)
    chat_terminal.run(_with_model(engine, model), conversation, prompt)


@app.command
def pull(model: str, /) -> None:
    """Fetch MODEL with a progress bar, and print its path.

    Args:
        model: An alias or hf:owner/name:file.
    """
    from shoal.model import registry

    print(registry.resolve(model, progress=True))


def _with_model(engine: EngineConfig, model: str | None) -> EngineConfig:
    return engine if model is None else dataclasses.replace(engine, model=model)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        status = app(
            arguments, exit_on_error=False, print_error=False, result_action="return_value"
        )
    except USAGE_ERRORS as error:
        return _fail(error, USAGE_ERROR)
    except RUNTIME_ERRORS as error:
        return _fail(error, RUNTIME_ERROR)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status if isinstance(status, int) else 0


def _fail(error: Exception, status: int) -> int:
    print(f"shoal: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
