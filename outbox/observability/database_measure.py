"""Measure the database at intervals, in one of the replicas, and report it as an event.

Only the replica that holds an advisory lock measures. The lock belongs to its session:
it is released as soon as the process is gone, and if the process hangs, the server ends
the session. A relay measures everything, so consumers measure only where no relay does.
They use a separate lock, which relays ignore.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

import psycopg

from outbox.administration.connection import AdministrationConnection, errors_explained
from outbox.errors import OutboxError, one_line
from outbox.events import Event
from outbox.observability.measures.pins import Pin
from outbox.observability.measures.reading import Part, Scope
from outbox.observability.overview import Overview, read_overview
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.postgres.connection import PIN_SESSION, conninfo
from outbox.postgres.pooler_check import refuse_pooler
from outbox.postgres.sql_files import load

APPLICATION_NAME: Final = "pillarbox metrics"
"""The application_name of the session that measures, in `pg_stat_activity`."""

_SHARE: Final = 50
"""Measuring takes up at most a 50th of the time."""
_RIGHTS: Final = (
    "run pillarbox migrate, which grants relays and consumers what they need"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurer:
    """A kind of process that measures, and the parts that its role can read.

    Attributes:
        lock: only the replica that holds it measures.
        yields_to: these replicas don't measure while this lock is held; None if they
            yield to no other lock.
    """

    parts: Sequence[Part]
    lock: Lock
    yields_to: Lock | None


RELAY: Final = Measurer(
    parts=("backlogs", "tables", "upkeep", "pins"),
    lock=Lock.MEASURE,
    yields_to=None,
)
CONSUMER: Final = Measurer(
    parts=("tables", "upkeep", "pins"),
    lock=Lock.MEASURE_BY_CONSUMER,
    yields_to=Lock.MEASURE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseMeasured(Event):
    """One replica measured the database, on behalf of all of them.

    Attributes:
        overview: what was measured; a consumer measures no backlog.
        pinned_for: how long the oldest transaction has been in use, as far as this role
            can see; otherwise, the time since it was first noticed.
        seconds: how long the measurement took.
    """

    level = logging.DEBUG

    overview: Overview = field(repr=False)
    pinned_for: timedelta
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseMeasuredElsewhere(Event):
    """Another replica is measuring the database."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseNotMeasured(Event):
    """The database could not be measured; the next attempt is one interval later."""

    level = logging.INFO
    about = ()

    reason: str


Notify: TypeAlias = Callable[[Event], None]


class DatabaseMeasure:
    """Measures the database, or stands by while another replica does.

    For one event loop; measurements run in a separate thread.

    Args:
        url: the URL of the database, or a function that returns it; if the function
            raises an `OutboxError`, the error is reported as an event.
        seconds: the interval, which grows if measuring takes long.
        measurer: RELAY or CONSUMER.
        grace: if a measurement is late by more than this, another replica takes over.
    """

    def __init__(
        self,
        url: str | Callable[[], str],
        *,
        seconds: float,
        notify: Notify,
        measurer: Measurer = RELAY,
        grace: timedelta = timedelta(minutes=1),
    ) -> None:
        self._url = url
        self._measurer = measurer
        self._scope = Scope(
            parts=measurer.parts,
            sizes=True,
            pins_from=timedelta(0),
            pins_behind=0,
        )
        self._is_direct = False
        self._seconds = seconds
        self._grace = grace.total_seconds()
        self._pause = seconds
        self._notify = notify
        self._connection: AdministrationConnection | None = None
        self._has_turn = False
        self._pins: dict[tuple[object, ...], float] = {}

    async def run(self) -> None:
        """Measure until cancelled. A failure is reported as an event."""
        loop = asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, thread_name_prefix="measure")
        is_waiting = False
        try:
            while True:
                event: Event | None
                try:
                    event = await loop.run_in_executor(thread, self._measure)
                except OutboxError as error:
                    event = DatabaseNotMeasured(reason=one_line(error))
                if event is not None:
                    self._notify(event)
                elif not is_waiting:
                    self._notify(DatabaseMeasuredElsewhere())
                is_waiting = event is None
                await asyncio.sleep(self._pause)
        finally:
            connection = self._connection
            if connection is not None:
                with contextlib.suppress(psycopg.Error):
                    connection.cancel()
            await loop.run_in_executor(thread, self._close)
            thread.shutdown(wait=False)

    def _measure(self) -> DatabaseMeasured | None:
        """Measure if it is this replica's turn; return None if another one measures."""
        try:
            url = self._url if isinstance(self._url, str) else self._url()
            if not self._is_direct:
                refuse_pooler(url)
                self._is_direct = True
            with errors_explained(url, _RIGHTS):
                if not self._run_due(url):
                    self._close()
                    return None
                assert self._connection is not None
                started = time.monotonic()
                overview = read_overview(self._connection, self._scope)
                took = time.monotonic() - started
                self._pause = max(self._seconds, took * _SHARE)
                # If the process hangs, the server ends its session.
                silence = int((self._pause + self._grace) * 1000)
                self._connection.execute(
                    "SELECT set_config('idle_session_timeout', %s, false)",
                    [str(silence)],
                )
                pinned_for = self._find_oldest(overview.pins)
                return DatabaseMeasured(
                    overview=overview, pinned_for=pinned_for, seconds=took
                )
        except BaseException:
            self._close()
            raise

    def _run_due(self, url: str) -> bool:
        if self._connection is None:
            self._connection = psycopg.connect(
                conninfo(url, application_name=APPLICATION_NAME), autocommit=True
            )
            self._connection.execute(PIN_SESSION)
            self._has_turn = False
        other = self._measurer.yields_to
        if other is not None:
            row = self._connection.execute(
                load("outbox", "is_lock_held"),
                {"lock_class": LOCK_CLASS, "lock": int(other)},
            ).fetchone()
            if row == (True,):
                return False
        if not self._has_turn:
            row = self._connection.execute(
                "SELECT pg_catalog.pg_try_advisory_lock(%s, %s)",
                (LOCK_CLASS, int(self._measurer.lock)),
            ).fetchone()
            self._has_turn = row == (True,)
        return self._has_turn

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _find_oldest(self, pins: tuple[Pin, ...]) -> timedelta:
        # Without pg_monitor, this role can see that other sessions need an old
        # transaction, and which one, but not since when.
        now = time.monotonic()
        seen = {(it.kind, it.name, it.pid, it.xid): it for it in pins}
        self._pins = {key: self._pins.get(key, now) for key in seen}
        ages = [
            it.open_for
            or timedelta(seconds=now - self._pins[key] if it.xid is not None else 0)
            for key, it in seen.items()
        ]
        return max(ages, default=timedelta(0))
