"""The HTTP server for health, readiness and metrics; needs aiohttp.

It runs on the process's own event loop, so an answer proves that the loop is running.
Each connection carries one request and lasts a few seconds at most.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from socket import socket
from typing import Any, Final, TypeAlias

from aiohttp import web
from typing_extensions import override

Handler: TypeAlias = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_SECONDS: Final = 10.0
"""How long a connection may stay open."""
_METHODS: Final = frozenset({"GET", "HEAD"})

# aiohttp logs a traceback for each request it can't parse; anyone could fill the log.
_discarded: Final = logging.getLogger("pillarbox.http_server")
_discarded.disabled = True


def answer(status: HTTPStatus, body: Mapping[str, Any]) -> web.Response:
    """Return a JSON response that must not be cached."""
    response = web.json_response(body, status=status)
    response.headers["Cache-Control"] = "no-store"
    return response


@asynccontextmanager
async def serve(
    listening: socket, handlers: Mapping[str, Handler]
) -> AsyncIterator[None]:
    """Answer requests on a listening socket for as long as the block runs.

    Takes ownership of the socket, and closes it at the end.

    Args:
        handlers: the handlers of GET and HEAD requests, by path.
    """

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        response = await _response(handlers, request)
        response.force_close()
        return response

    server = _Server(handle, access_log=None, logger=_discarded, lingering_time=0)
    runner = web.ServerRunner(server, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        yield
    finally:
        await runner.cleanup()


async def _response(
    handlers: Mapping[str, Handler], request: web.BaseRequest
) -> web.StreamResponse:
    if request.method not in _METHODS:
        return answer(HTTPStatus.METHOD_NOT_ALLOWED, {"methods": sorted(_METHODS)})
    handler = handlers.get(request.path)
    if handler is None:
        return answer(HTTPStatus.NOT_FOUND, {"paths": sorted(handlers)})
    try:
        return await handler(request)
    except Exception:
        logging.getLogger("pillarbox").exception("GET %s failed", request.path)
        return answer(HTTPStatus.INTERNAL_SERVER_ERROR, {})


class _Server(web.Server):
    """Limits how long a connection is open."""

    @override
    def connection_made(
        self, handler: web.RequestHandler, transport: asyncio.Transport
    ) -> None:
        super().connection_made(handler, transport)
        asyncio.get_running_loop().call_later(MAX_SECONDS, transport.abort)
