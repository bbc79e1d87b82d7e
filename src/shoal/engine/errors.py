"""What can go wrong between a request and its answer, apart from the request itself."""

from __future__ import annotations


class EngineStartError(Exception):
    """The engine could not start; the message is one line for the user."""


class EngineDeadError(Exception):
    """The engine has stopped for good and serves nobody any more."""


class RequestFailedError(Exception):
    """The engine failed to compute this request; others are not affected."""


def describe(error: Exception) -> str:
    """An unexpected error in one line: its type and its text."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(error: Exception) -> str:
    """The text of an error that was written for the user, in one line."""
    return " ".join(str(error).split())
