"""Every setting of the HTTP server, once: documented and validated here; the flags come from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shoal.config import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]


class ServerStartError(Exception):
    """The server can't start; the message is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server.

    Raises:
        ConfigError: a value is outside its range.
    """

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all networks."""

    port: int = 8000
    """Port to listen on; 0 takes a free one."""

    served_model_name: tuple[str, ...] = ()
    """Names of the model in the API, may be repeated; by default the model's own."""

    api_key: str | None = field(default=None, repr=False)
    """Key that clients must send as a bearer token; SHOAL_API_KEY when not set."""

    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish after SIGTERM or SIGINT."""

    log_level: LogLevel = "info"
    """Least severe messages to log."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be between 0 and 65535, got {self.port}")
        if not 0 <= self.shutdown_timeout < float("inf"):
            raise ConfigError(f"shutdown_timeout must be 0 or more, got {self.shutdown_timeout}")
        if not all(self.served_model_name):
            raise ConfigError("served_model_name must not be empty")
        if self.api_key == "":
            raise ConfigError("api_key must not be empty")
