"""A process records in the database that it runs, and how it does.

Its row in `outbox.process` or `inbox.process` is updated every ten seconds, and within
a second when something begins or stops failing, a handler becomes overdue or ends, or
another replica begins or stops receiving its topics.
If a row isn't updated for a minute, its process is gone, or has no connection for it.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final
from uuid import uuid4

from pillarbox.outbox.errors import one_line
from pillarbox.outbox.events import Event, Observer, ProcessMeasured
from pillarbox.outbox.gather import end
from pillarbox.outbox.observability.counters import TopicCounters
from pillarbox.outbox.postgres.remedy import remedy_of

RELEASE_VARIABLE: Final = "PILLARBOX_RELEASE"
INTERVAL: Final = 10.0
"""Seconds between two updates of the row."""
_REPORT: Final = 5.0
_LOOK: Final = 1.0
_LAST_WAIT: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PresenceNotRecorded(Event):
    """The process could not record that it runs, so `pillarbox status` lacks it.

    It processes messages regardless, and tries again after ten seconds.

    Attributes:
        reason: the error.
        remedy: what to do, chosen by the error's SQLSTATE.
    """

    about = ()
    lasting_level = logging.WARNING

    reason: str
    remedy: str


class Presence:
    """Reports how a process does, and keeps its row. For one event loop.

    Args:
        broker: where it publishes to or receives from, without credentials.
        measure: returns how it does now.
        write: runs `beat.sql` with these values; None if it has no connection for that.
        counters: counts by topic what the process does.
        notify: called with each measurement, and with a failure to write, which never
            stops the process.
    """

    def __init__(
        self,
        broker: str,
        measure: Callable[[], ProcessMeasured],
        write: Callable[[dict[str, Any]], Awaitable[object]] | None,
        notify: Observer,
        counters: TopicCounters,
    ) -> None:
        self._counters = counters
        self._values: dict[str, Any] = {
            "id": uuid4(),
            "host": this_process(),
            "broker": broker,
        }
        self._measure = measure
        self._write = write
        self._notify = notify
        self._has_row = False

    @asynccontextmanager
    async def recorded(self) -> AsyncIterator[None]:
        """Keep the row for as long as the block runs, and then delete it."""
        # Before its first message, a consumer knows what is paused.
        await self._beat(self._measure())
        tasks = [asyncio.create_task(self._report())]
        if self._write is not None:
            tasks.append(asyncio.create_task(self._keep()))
        try:
            yield
        finally:
            await end(tasks)
            if self._has_row:  # an outage doesn't delay the end
                await self._beat(self._measure(), ends=True)

    async def _report(self) -> None:
        while True:
            self._notify(self._measure())
            await asyncio.sleep(_REPORT)

    async def _keep(self) -> None:
        before = _urgent(self._measure())
        due = time.monotonic() + INTERVAL
        while True:
            await asyncio.sleep(_LOOK)
            measured = self._measure()
            now = _urgent(measured)
            if now != before or time.monotonic() >= due:
                before, due = now, time.monotonic() + INTERVAL
                await self._beat(measured)

    async def _beat(self, measured: ProcessMeasured, *, ends: bool = False) -> None:
        if self._write is None:
            return
        values = {
            **asdict(measured),
            **self._values,
            "counters": self._counters.as_json(),
            "ends": ends,
        }
        try:
            async with asyncio.timeout(_LAST_WAIT if ends else None):
                await self._write(values)
            self._has_row = True
        except Exception as error:  # noqa: BLE001 - of any driver
            self._has_row = False
            if not ends:
                self._notify(
                    PresenceNotRecorded(reason=one_line(error), remedy=remedy_of(error))
                )


def this_process() -> str:
    """Return its host and process id, and which release of your code it runs."""
    release = os.environ.get(RELEASE_VARIABLE)
    shown = f" ({release})" if release else ""
    return f"{socket.gethostname()} {os.getpid()}{shown}"


def _urgent(measured: ProcessMeasured) -> tuple[object, ...]:
    """Return what is recorded at once when it changes."""
    fails = measured.failing_since is not None
    return fails, measured.is_overdue, measured.standing_by
