"""POST /reset_prefix_cache."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.server.connection import run_while_connected
from shoal.server.responses import PrefixCacheReset
from shoal.server.state import ServerState


async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached KV blocks and say how many. Running requests keep theirs."""
    state: ServerState = request.app.state.server
    state.require_ready()
    reset = state.engine.reset_prefix_cache()
    num_blocks = await run_while_connected(state, request.receive, reset)
    answer = PrefixCacheReset(num_blocks=num_blocks)
    return Response(msgspec.json.encode(answer), media_type="application/json")
