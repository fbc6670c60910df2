"""Liveness and readiness, for supervisors and load balancers.

The event loop answers `/live`, so any answer proves that it is running. `/ready` shows
whether the process has started and can reach its broker and its database, according to
its events. A restart doesn't end their outages, so let only `/live` cause one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pillarbox.outbox.events import Event, StartDelayed

if TYPE_CHECKING:
    from aiohttp import web

    from pillarbox.outbox.observability.http_server import Handler


@dataclass(frozen=True, slots=True)
class Outage:
    """Something that a process waits for.

    Attributes:
        reason: the last error.
    """

    waits_for: str
    since: datetime
    reason: str


class Outages:
    """The outages of a process that have not ended; an observer of its events."""

    def __init__(self) -> None:
        self._open: dict[tuple[type[Event], Any], Outage] = {}

    def __call__(self, event: Event) -> None:
        """Begin or end an outage."""
        if event.waits_for is None and not event.ends:
            return
        # Each queue of a consumer has a connection of its own.
        queue = getattr(event, "queue", None)
        for kind in event.ends:
            self._open.pop((kind, queue), None)
        if (what := event.waits_for) is not None:
            what = what if queue is None else f"{what} of {queue}"
            before = self._open.get((type(event), queue))
            self._open[type(event), queue] = Outage(
                what,
                datetime.now(UTC) if before is None else before.since,
                getattr(event, "reason", f"waiting for {what}"),
            )

    def longest_first(self) -> list[Outage]:
        """Return the outages, starting with the one that has lasted longest."""
        return sorted(self._open.values(), key=lambda outage: outage.since)


class Health:
    """Whether a process is ready, according to its events; an observer of them.

    Args:
        started: the event after which the process is ready.
    """

    def __init__(self, started: type[Event]) -> None:
        self._started = started
        self._outages = Outages()
        self._start: str | None = "start"

    def __call__(self, event: Event) -> None:
        """Update the readiness from an event."""
        self._outages(event)
        if isinstance(event, StartDelayed):
            self._start = f"start: {event.reason}"
        if type(event) is self._started:
            self._start = None

    def stopping(self) -> None:
        """Stop reporting that the process is ready."""
        self._start = "end"

    @property
    def waits_for(self) -> list[str]:
        """What the process is waiting for; empty if it is ready."""
        start = [] if self._start is None else [self._start]
        return start + sorted(it.waits_for for it in self._outages.longest_first())

    def handlers(self) -> "Mapping[str, Handler]":
        """Return the request handlers, by path; needs aiohttp."""

        async def ready(_: "web.BaseRequest") -> "web.StreamResponse":
            return answer_ready(self.waits_for)

        return {"/live": answer_live, "/ready": ready}


async def answer_live(_: "web.BaseRequest") -> "web.StreamResponse":
    """Answer `/live`."""
    from pillarbox.outbox.observability.http_server import answer

    return answer(HTTPStatus.OK, {"live": True})


def answer_ready(waits_for: Sequence[str]) -> "web.StreamResponse":
    """Answer `/ready`: 200, unless there is something that is waited for."""
    from pillarbox.outbox.observability.http_server import answer

    status = HTTPStatus.SERVICE_UNAVAILABLE if waits_for else HTTPStatus.OK
    return answer(status, {"ready": not waits_for, "waits_for": waits_for})
