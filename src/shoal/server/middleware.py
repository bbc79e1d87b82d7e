"""The outermost layer: request ids, the API key, the last resort for errors, the access log."""

from __future__ import annotations

import hmac
import logging

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.server.dashboard import PAGE_PATHS, STATE_PATH
from shoal.server.errors import ApiError, to_api_error
from shoal.server.record import RequestRecord
from shoal.server.state import ServerState

OPEN_PATHS = frozenset({"/health", "/ready", "/metrics", "/version"}) | PAGE_PATHS
GENERATION_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
POLLED_PATHS = frozenset({"/health", "/ready", "/metrics", STATE_PATH})
MAX_REQUEST_ID_CHARS = 128

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("shoal.access")


class RequestMiddleware:
    """Wraps the application; see the module."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = _make_record(scope, headers)
        scope.setdefault("state", {})["record"] = record
        id_header = (b"x-request-id", record.client_request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        with self._state.in_flight(record):
            await self._answer(scope, receive, send_with_id, headers, record)
        if record.refusal is not None and record.path in GENERATION_PATHS:
            self._state.metrics.refused(record.refusal)
        level = logging.DEBUG if record.path in POLLED_PATHS else logging.INFO
        access_logger.log(level, "%s", record.log_line())

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, record: RequestRecord
    ) -> None:
        try:
            if self._is_authorized(record.path, headers):
                await self._app(scope, receive, send)
                return
            error = _unauthorized()
        except Exception as fault:
            logger.exception("request %s failed", record.client_request_id)
            if record.status is not None:
                return
            error = to_api_error(fault)
        record.failed(error.code, error.refusal)
        await error.response()(scope, receive, send)

    def _is_authorized(self, path: str, headers: Headers) -> bool:
        key = self._state.api_key
        if key is None or path in OPEN_PATHS:
            return True
        scheme, _, token = headers.get("authorization", "").partition(" ")
        # Compared as bytes: compare_digest refuses strings outside ASCII.
        return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), key.encode())


def _unauthorized() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or wrong; send it as 'Authorization: Bearer <key>'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _make_record(scope: Scope, headers: Headers) -> RequestRecord:
    """A record whose id is the client's when that is short, printable ASCII.

    It starts when the request's first bytes came, where the server tells.
    """
    record = RequestRecord("", scope["method"], scope["path"])
    record.start = scope.get("state", {}).get("received", record.start)
    given = headers.get("x-request-id", "")
    is_usable = 0 < len(given) <= MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
    record.client_request_id = given if is_usable else record.request_id
    return record
