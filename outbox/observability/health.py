"""Liveness and readiness, for supervisors and load balancers.

The event loop answers `/live`, so any answer proves that it is running. `/ready` tells
whether the process has started and can reach its broker and its database, according to
its events. A restart doesn't end their outages, so let only `/live` cause one.
"""

from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from outbox.events import Event

if TYPE_CHECKING:
    from aiohttp import web

    from outbox.observability.http_server import Handler


class Health:
    """Whether a process is ready, according to its events; an observer of them.

    Args:
        started: the event after which the process is ready.
        found: for each event that reports a loss, the event that reports its end.
        more: additional pages, as JSON, by path.
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
        self._telling = frozenset({started, *found, *found.values()})
        self._away: dict[tuple[type[Event], Any], str] = {}
        self._start: str | None = "start"

    def __call__(self, event: Event) -> None:
        """Update the readiness from an event."""
        kind = type(event)
        if kind not in self._telling:
            return
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
        """Stop reporting that the process is ready."""
        self._start = "end"

    @property
    def waits_for(self) -> list[str]:
        """What the process is waiting for; empty if it is ready."""
        start = [] if self._start is None else [self._start]
        return start + sorted(self._away.values())

    def handlers(self) -> "Mapping[str, Handler]":
        """Return the request handlers, by path; needs aiohttp."""
        from outbox.observability.http_server import answer

        async def live(_: "web.BaseRequest") -> "web.StreamResponse":
            return answer(HTTPStatus.OK, {"live": True})

        async def ready(_: "web.BaseRequest") -> "web.StreamResponse":
            waits_for = self.waits_for
            status = HTTPStatus.SERVICE_UNAVAILABLE if waits_for else HTTPStatus.OK
            return answer(status, {"ready": not waits_for, "waits_for": waits_for})

        async def page(
            tell: Callable[[], Mapping[str, Any]], _: "web.BaseRequest"
        ) -> "web.StreamResponse":
            return answer(HTTPStatus.OK, tell())

        more = {path: partial(page, tell) for path, tell in self._more.items()}
        return {"/live": live, "/ready": ready, **more}
