"""OpenAI error objects: every failure of the server leaves as `{"error": {...}}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal.engine.errors import EngineDeadError, RequestFailedError
from shoal.model.chat import ChatTemplateError
from shoal.request import InvalidParameterError
from shoal.scheduler.interface import QueueFullError, RequestRejectedError, TimeLimitError
from shoal.server.record import Refusal, record_of

# An error says what is wrong; it never sends the body back.
MAX_MESSAGE_CHARS = 600
MAX_PARAM_CHARS = 100

CLIENT_CLOSED_REQUEST = 499  # nobody is there to read it; nginx's number, for the log

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ErrorDetail(msgspec.Struct, frozen=True):
    """What went wrong, in the words of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error response, and of an error event in a stream."""

    error: ErrorDetail


class ApiError(Exception):
    """A failure with its HTTP status.

    `param` names the parameter that is to blame. `refusal` is set if the server turned the request
    away, rather than failed on it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        refusal: Refusal | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.refusal = refusal

    def body(self) -> bytes:
        """The error object as JSON, bounded whatever the message holds."""
        kind = INVALID_REQUEST if self.status < 500 else SERVER_ERROR
        if self.status == HTTPStatus.UNAUTHORIZED:
            kind = "authentication_error"
        elif self.status == HTTPStatus.TOO_MANY_REQUESTS:
            kind = "rate_limit_error"
        param = None if self.param is None else clip(self.param, MAX_PARAM_CHARS)
        detail = ErrorDetail(clip(self.message, MAX_MESSAGE_CHARS), kind, param, self.code)
        return msgspec.json.encode(ErrorBody(detail))

    def response(self) -> Response:
        """The error as an HTTP response."""
        return Response(self.body(), self.status, self.headers, "application/json")


class ClientDisconnectedError(Exception):
    """The client went away before its answer was complete."""


class ServerStoppedError(Exception):
    """The server stops now and drops the requests that still run."""


def clip(text: str, limit: int) -> str:
    """`text` in at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def bad_request(
    message: str,
    param: str | None = None,
    code: str | None = None,
    *,
    refusal: Refusal = "invalid",
) -> ApiError:
    """A 400 that blames `param`."""
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code, refusal=refusal)


def unavailable(message: str, code: str, *, refusal: Refusal | None = "unavailable") -> ApiError:
    """A 503 after which the client may try again."""
    return ApiError(
        HTTPStatus.SERVICE_UNAVAILABLE,
        message,
        code=code,
        headers={"Retry-After": "1"},
        refusal=refusal,
    )


def _too_many(error: QueueFullError, refusal: Literal["queue_full", "time_limit"]) -> ApiError:
    """A 429 that says when to come again; whole seconds, as the header has them, rounded up."""
    return ApiError(
        HTTPStatus.TOO_MANY_REQUESTS,
        str(error),
        code=refusal,
        headers={"Retry-After": str(max(1, math.ceil(error.retry_after)))},
        refusal=refusal,
    )


def to_api_error(error: Exception) -> ApiError:  # noqa: PLR0911 - one case a kind
    """What the client is told about `error`; unknown kinds become a 500 without details."""
    match error:
        case ApiError():
            return error
        case InvalidParameterError():
            return bad_request(str(error), error.parameter, "invalid_parameter")
        case RequestRejectedError():
            return bad_request(str(error), "prompt", "context_length_exceeded", refusal="rejected")
        case ChatTemplateError():
            return bad_request(str(error), "messages", "chat_template_error")
        case TimeLimitError():
            return _too_many(error, "time_limit")
        case QueueFullError():
            return _too_many(error, "queue_full")
        case ClientDisconnectedError():
            return ApiError(CLIENT_CLOSED_REQUEST, "The client went away.")
        case ServerStoppedError():
            return unavailable("The server is shutting down.", "shutting_down", refusal=None)
        case EngineDeadError():
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="engine_dead")
        case RequestFailedError():
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, str(error), code="request_failed")
        case HTTPException():
            return _routing_error(error)
        case _:
            return ApiError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "The server failed on this request; its log has the details.",
                code="internal_error",
            )


def _routing_error(error: HTTPException) -> ApiError:
    """404 for an unknown route and 405 for a wrong method, as the router raises them."""
    code = HTTPStatus(error.status_code).name.lower()
    return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)


# The kinds that a handler may raise and that are an answer rather than a fault.
EXPECTED_ERRORS: tuple[type[Exception], ...] = (
    ApiError,
    InvalidParameterError,
    RequestRejectedError,
    ChatTemplateError,
    QueueFullError,
    ClientDisconnectedError,
    ServerStoppedError,
    EngineDeadError,
    RequestFailedError,
    HTTPException,
)


async def answer_error(request: Request, error: Exception) -> Response:
    """Exception handler of the application for `EXPECTED_ERRORS`."""
    api_error = to_api_error(error)
    record_of(request).failed(api_error.code, api_error.refusal)
    return api_error.response()
