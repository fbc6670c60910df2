"""The HTTP server for health, readiness and metrics; needs aiohttp.

It runs on the process's own event loop, so an answer proves that the loop is running.
Clients can do the process little harm: each connection carries one request and lasts a
few seconds at most, and when too many are open, the oldest is closed, so that idle
clients can't keep a probe from being answered.
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
MAX_CONNECTIONS: Final = 100
"""How many connections may be open at once."""
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
    """Limits how many connections are open, and for how long."""

    def __init__(self, handler: Handler, **options: Any) -> None:
        super().__init__(handler, **options)
        self._open: dict[
            web.RequestHandler, tuple[asyncio.Transport, asyncio.TimerHandle]
        ] = {}

    @override
    def connection_made(
        self, handler: web.RequestHandler, transport: asyncio.Transport
    ) -> None:
        super().connection_made(handler, transport)
        if len(self._open) >= MAX_CONNECTIONS:
            self._forget(next(iter(self._open))).abort()
        timer = asyncio.get_running_loop().call_later(MAX_SECONDS, transport.abort)
        self._open[handler] = transport, timer

    @override
    def connection_lost(
        self, handler: web.RequestHandler, exc: BaseException | None = None
    ) -> None:
        super().connection_lost(handler, exc)
        if handler in self._open:
            self._forget(handler)

    def _forget(self, handler: web.RequestHandler) -> asyncio.Transport:
        transport, timer = self._open.pop(handler)
        timer.cancel()
        return transport
