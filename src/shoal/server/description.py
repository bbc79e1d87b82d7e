"""GET /openapi.json: the description of the API, made of the handlers and their bodies."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

_SCHEMA_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)(:\w+)?\}")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method and path of the API."""

    method: str
    path: str
    handler: Callable[[Request], Awaitable[Response]]
    body: type[msgspec.Struct] | None = None

    @property
    def operation(self) -> dict[str, Any]:
        """The operation object of OpenAPI."""
        operation: dict[str, Any] = {
            "summary": (self.handler.__doc__ or "").partition("\n")[0],
            "operationId": self.handler.__name__,
            "responses": {"200": {"description": "The answer; errors have the form of OpenAI's."}},
        }
        if names := [name for name, _ in _PARAMETER.findall(self.path)]:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        if self.body is not None:
            schema = {"$ref": _SCHEMA_REF.format(name=self.body.__name__)}
            content = {"application/json": {"schema": schema}}
            operation["requestBody"] = {"required": True, "content": content}
        return operation


class Description:
    """The OpenAPI document of some endpoints, made when it is first asked for."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints

    @cached_property
    def json(self) -> bytes:
        """The document."""
        bodies = [endpoint.body for endpoint in self._endpoints if endpoint.body is not None]
        _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMA_REF)
        paths: dict[str, dict[str, Any]] = {}
        for endpoint in self._endpoints:
            path = _PARAMETER.sub(r"{\1}", endpoint.path)
            paths.setdefault(path, {})[endpoint.method.lower()] = endpoint.operation
        return msgspec.json.encode(
            {
                "openapi": "3.1.0",
                "info": {"title": "Shoal", "version": version("shoal")},
                "paths": paths,
                "components": {"schemas": schemas},
            }
        )


async def show_description(request: Request) -> Response:
    """The description of the API, by OpenAPI 3.1."""
    description: Description = request.app.state.description
    return Response(description.json, media_type="application/json")
