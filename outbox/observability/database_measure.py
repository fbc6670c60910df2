"""Measure the database at intervals, and report it as an event.

Each process that exports metrics measures what its role can read, through a connection
that it opens for that. It uses one transaction, so a pooler may be in between.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Final

import psycopg

from pillarbox.outbox.administration.check import Finding
from pillarbox.outbox.administration.connection import (
    AdministrationConnection,
    errors_explained,
)
from pillarbox.outbox.administration.doctor import OF_PROCESSES, find_quickly
from pillarbox.outbox.errors import OutboxError, one_line
from pillarbox.outbox.events import Event, Observer
from pillarbox.outbox.observability.measures.pins import Pin
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.overview import Overview, read_overview
from pillarbox.outbox.postgres.connection import PIN_SESSION_LOCALLY, conninfo

APPLICATION_NAME: Final = "pillarbox metrics"
"""The application_name of the session that measures, in `pg_stat_activity`."""

_SHARE: Final = 50
"""Measuring takes up at most a 50th of the time."""
_RIGHTS: Final = (
    "run pillarbox migrate, which grants relays and consumers what they need"
)
# As many reasons as dead letters are counted, since the metrics add them up by origin.
RELAY: Final = Scope(
    parts=("backlogs", "dead_letters", "tables", "pins"),
    sides=["outbox"],
    reasons=Scope().rows,
    pins_from=timedelta(0),
    pins_behind=0,
)
CONSUMER: Final = replace(RELAY, parts=("dead_letters", "pins"), sides=["inbox"])


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseMeasured(Event):
    """The process measured the database.

    Attributes:
        overview: what was measured; a consumer measures no backlog.
        findings: what is wrong with it, as `pillarbox status` reports it.
    """

    level = logging.DEBUG

    overview: Overview = field(repr=False)
    findings: tuple[Finding, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseNotMeasured(Event):
    """The database could not be measured; the next attempt is one interval later."""

    level = logging.INFO
    about = ()

    reason: str


class DatabaseMeasure:
    """Measures the database. For one event loop; it measures in a separate thread.

    Args:
        url: returns the URL of the database; if it raises an `OutboxError`, the error
            is reported as an event.
        scope: RELAY or CONSUMER.
        seconds: the interval, which grows if measuring takes long.
    """

    def __init__(
        self,
        url: Callable[[], str],
        scope: Scope,
        *,
        seconds: float,
        notify: Observer,
    ) -> None:
        self._url = url
        self._scope = scope
        self._seconds = seconds
        self._pause = seconds
        self._notify = notify
        self._connection: AdministrationConnection | None = None
        self._pins: dict[tuple[object, ...], float] = {}

    async def run(self) -> None:
        """Measure until cancelled. A failure is reported as an event."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="measure")
        try:
            while True:
                event: Event
                try:
                    event = await loop.run_in_executor(thread, self._measure)
                except OutboxError as error:
                    event = DatabaseNotMeasured(reason=one_line(error))
                self._notify(event)
                await asyncio.sleep(self._pause)
        finally:
            if self._connection is not None:
                with contextlib.suppress(psycopg.Error):
                    self._connection.cancel()
            await asyncio.to_thread(thread.shutdown)

    def _measure(self) -> DatabaseMeasured:
        url = self._url()
        with (
            errors_explained(url, _RIGHTS),
            # A prepared statement would outlast the transaction in a pooler's session.
            psycopg.connect(
                conninfo(url, application_name=APPLICATION_NAME), prepare_threshold=None
            ) as connection,
        ):
            self._connection = connection
            connection.execute(PIN_SESSION_LOCALLY)
            started = time.monotonic()
            overview = read_overview(connection, self._scope)
            overview = replace(overview, pins=self._with_ages(overview.pins))
            findings = find_quickly(connection, overview, OF_PROCESSES)
            took = time.monotonic() - started
        self._pause = max(self._seconds, took * _SHARE)
        return DatabaseMeasured(overview=overview, findings=findings)

    def _with_ages(self, pins: tuple[Pin, ...]) -> tuple[Pin, ...]:
        # Without pg_monitor, this role can see that other sessions need an old
        # transaction, and which one, but not since when.
        now, before, self._pins = time.monotonic(), self._pins, {}
        aged = []
        for pin in pins:
            key = pin.kind, pin.name, pin.pid, pin.xid
            since = self._pins[key] = before.get(key, now)
            if pin.open_for is None and pin.xid is not None:
                pin = replace(pin, open_for=timedelta(seconds=now - since))
            aged.append(pin)
        return tuple(aged)
