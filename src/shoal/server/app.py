"""The application: routes, error handlers and the middleware around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from shoal.server import chat, completions, dashboard, prefix_cache, probes, tokenization
from shoal.server.errors import EXPECTED_ERRORS, answer_error
from shoal.server.middleware import RequestMiddleware
from shoal.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from shoal.server.state import ServerState

Handler = Callable[[Request], Awaitable[Response]]

_GET_ROUTES: tuple[tuple[str, Handler], ...] = (
    ("/health", probes.health),
    ("/ready", probes.ready),
    ("/metrics", probes.metrics),
    ("/version", probes.show_version),
    ("/v1/models", probes.list_models),
    ("/v1/models/{model:path}", probes.get_model),
)
_POST_ROUTES: tuple[tuple[str, Handler, type[msgspec.Struct]], ...] = (
    ("/v1/completions", completions.create_completion, CompletionBody),
    ("/v1/chat/completions", chat.create_chat_completion, ChatBody),
    ("/tokenize", tokenization.tokenize, TokenizeBody),
    ("/detokenize", tokenization.detokenize, DetokenizeBody),
)
_SCHEMA_REF = "#/components/schemas/{name}"


class ServerApp(FastAPI):
    """FastAPI, with the request bodies of msgspec in the description of the API."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI description, made once."""
        if self.openapi_schema is None:
            bodies = [body for _, _, body in _POST_ROUTES]
            _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMA_REF)
            super().openapi().setdefault("components", {})["schemas"] = schemas
        return super().openapi()


def create_app(state: ServerState) -> FastAPI:
    """The application that serves `state.engine`.

    Handlers decode their bodies themselves with msgspec, which is strict about types and costs a
    fraction of a validation by pydantic.
    """
    app = ServerApp(title="Shoal", version=version("shoal"), docs_url=None, redoc_url=None)
    app.state.server = state
    for path, handler in _GET_ROUTES:
        app.add_api_route(path, handler, methods=["GET"])
    for path, handler in (
        *dashboard.page_handlers(),
        (dashboard.STATE_PATH, dashboard.dashboard_state),
    ):
        app.add_api_route(path, handler, methods=["GET"], include_in_schema=False)
    for path, handler, body in _POST_ROUTES:
        ref = {"$ref": _SCHEMA_REF.format(name=body.__name__)}
        content = {"application/json": {"schema": ref}}
        extra = {"requestBody": {"required": True, "content": content}}
        app.add_api_route(path, handler, methods=["POST"], openapi_extra=extra)
    app.add_api_route("/reset_prefix_cache", prefix_cache.reset_prefix_cache, methods=["POST"])
    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(RequestMiddleware, state=state)
    return app
