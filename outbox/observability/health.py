"""Liveness and readiness over HTTP, for who starts, routes to and restarts processes.

`/live` is answered by the event loop itself, so the answer is the proof. `/ready` says
whether the process has started and reaches its broker and its database, as its events
tell. Those come back; so let a restart hang on `/live` only.
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Final

from outbox.events import Event
from outbox.observability.listen_address import ListenAddress, address_of

_MAX_SECONDS: Final = 5.0
_NO_REQUEST: Final = (
    OSError,
    TimeoutError,
    ValueError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
)


class Health:
    """What a process's events tell of it; an observer of them.

    Args:
        started: the event after which it is ready.
        found: for each event that says what is away, the one that says it is back.
        more: what else is told, as JSON, by path.
    """

    def __init__(
        self,
        started: type[Event],
        found: Mapping[type[Event], type[Event]],
        more: Mapping[str, Callable[[], Mapping[str, Any]]] | None = None,
    ) -> None:
        self._more = dict(more or {})
        self._started = started
        self._found = {back: away for away, back in found.items()}
        self._lost = set(found)
        self._away: dict[tuple[type[Event], Any], str] = {}
        self._start: str | None = "start"

    def __call__(self, event: Event) -> None:
        """Learn from an event."""
        kind = type(event)
        # Each queue of a consumer has a connection of its own.
        queue = getattr(event, "queue", None)
        if kind is self._started:
            self._start = None
        elif kind in self._lost:
            what = getattr(kind, "waits_for", None)
            what = what or kind.__name__.removesuffix("Lost").lower()
            self._away[kind, queue] = what if queue is None else f"{what} of {queue}"
        elif kind in self._found:
            self._away.pop((self._found[kind], queue), None)

    def stopping(self) -> None:
        """Be no longer ready."""
        self._start = "end"

    @property
    def waits_for(self) -> list[str]:
        """Why it is not ready; nothing if it is."""
        start = [] if self._start is None else [self._start]
        return start + sorted(self._away.values())

    @asynccontextmanager
    async def served(self, address: ListenAddress) -> AsyncIterator[None]:
        """Answer on this address for as long as the block runs.

        Raises:
            ConfigError: it can't be listened on.
        """
        listening = address.listen("health-listen")
        server = await asyncio.start_server(self._answer, sock=listening)
        logging.getLogger("pillarbox").info(
            "health endpoint listening on %s", address_of(listening)
        )
        try:
            yield
        finally:
            server.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            with suppress(*_NO_REQUEST):
                async with asyncio.timeout(_MAX_SECONDS):
                    request = await reader.readuntil(b"\r\n")
                    method, path = request.decode("ascii").split()[:2]
                    while (await reader.readline()).strip():
                        pass  # headers say nothing that we need
                    writer.write(self._response(method, path.partition("?")[0]))
                    await writer.drain()
        finally:
            writer.close()

    def _response(self, method: str, path: str) -> bytes:
        status = HTTPStatus.OK
        said: Mapping[str, Any] = {}
        if method not in {"GET", "HEAD"}:
            status = HTTPStatus.METHOD_NOT_ALLOWED
        elif path == "/ready":
            waits_for = self.waits_for
            said = {"ready": not waits_for, "waits_for": waits_for}
            status = HTTPStatus.SERVICE_UNAVAILABLE if waits_for else status
        elif path == "/live":
            said = {"live": True}
        elif path in self._more:
            said = self._more[path]()
        else:
            status = HTTPStatus.NOT_FOUND
            said = {"paths": ["/live", "/ready", *self._more]}
        body = json.dumps(said).encode() + b"\n"
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\n"
            "Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n"
            "Cache-Control: no-store\r\n"
            "Connection: close\r\n\r\n"
        ).encode()
        return head if method == "HEAD" else head + body
