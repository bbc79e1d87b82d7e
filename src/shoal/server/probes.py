"""GET /health, /ready, /metrics, /version and /v1/models: what operators and clients look up."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import version

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from shoal.server.errors import ApiError
from shoal.server.responses import Model, ModelList
from shoal.server.state import ServerState


async def health(request: Request) -> Response:
    """200 while the process serves, also while the model loads; 503 when the engine is dead."""
    state: ServerState = request.app.state.server
    if not state.engine.is_alive:
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "The engine has died.", code="engine_dead")
    return Response(b'{"status":"ok"}', media_type="application/json")


async def ready(request: Request) -> Response:
    """200 while a request would be served, else 503 with the reason."""
    state: ServerState = request.app.state.server
    state.require_ready()
    return Response(b'{"status":"ready"}', media_type="application/json")


async def metrics(request: Request) -> Response:
    """The metrics in Prometheus' text format."""
    state: ServerState = request.app.state.server
    return Response(state.metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})


async def show_version(request: Request) -> Response:
    """The version of Shoal."""
    del request
    return _json({"version": version("shoal")})


async def list_models(request: Request) -> Response:
    """The served models: one model, by each of its names."""
    state: ServerState = request.app.state.server
    return _json(ModelList(data=[_model(state, name) for name in state.model_names]))


async def get_model(request: Request) -> Response:
    """One served model."""
    state: ServerState = request.app.state.server
    return _json(_model(state, state.resolve_model(request.path_params["model"])))


def _model(state: ServerState, name: str) -> Model:
    max_model_len = state.engine.info.max_model_len if state.engine.is_ready else None
    return Model(id=name, created=state.created, max_model_len=max_model_len)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
