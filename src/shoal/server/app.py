"""The application: routes, error handlers and the middleware around them."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route

from shoal.server import chat, completions, dashboard, prefix_cache, probes, tokenization
from shoal.server.description import Description, Endpoint, show_description
from shoal.server.errors import EXPECTED_ERRORS, answer_error
from shoal.server.middleware import RequestMiddleware
from shoal.server.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from shoal.server.state import ServerState

_ENDPOINTS = (
    Endpoint("GET", "/health", probes.health),
    Endpoint("GET", "/ready", probes.ready),
    Endpoint("GET", "/metrics", probes.metrics),
    Endpoint("GET", "/version", probes.show_version),
    Endpoint("GET", "/v1/models", probes.list_models),
    Endpoint("GET", "/v1/models/{model:path}", probes.get_model),
    Endpoint("POST", "/v1/completions", completions.create_completion, CompletionBody),
    Endpoint("POST", "/v1/chat/completions", chat.create_chat_completion, ChatBody),
    Endpoint("POST", "/tokenize", tokenization.tokenize, TokenizeBody),
    Endpoint("POST", "/detokenize", tokenization.detokenize, DetokenizeBody),
    Endpoint("POST", "/reset_prefix_cache", prefix_cache.reset_prefix_cache),
)
_PAGES = (*dashboard.page_handlers(), (dashboard.STATE_PATH, dashboard.dashboard_state))


def create_app(state: ServerState) -> Starlette:
    """The application that serves `state.engine`.

    Handlers decode their bodies themselves with msgspec, which is strict about types and costs a
    fraction of a validation by pydantic.
    """
    app = Starlette(
        routes=[
            *(Route(path, handler) for path, handler in _PAGES),
            *(Route(e.path, e.handler, methods=[e.method]) for e in _ENDPOINTS),
            Route("/openapi.json", show_description),
        ]
    )
    app.state.server = state
    app.state.description = Description(_ENDPOINTS)
    for kind in EXPECTED_ERRORS:
        app.add_exception_handler(kind, answer_error)
    app.add_middleware(RequestMiddleware, state=state)
    return app
