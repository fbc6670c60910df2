"""Measure backlogs, failures, processes and partitions from the database.

No single process sees all of this. `pillarbox status`, the page, the metrics and the
doctor share this measurement. Its cost depends on what waits, not on what is kept: it
starts at the positions, counts up to a limit, and reads no payloads. Members of
`pillarbox_monitor` can read all of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from pillarbox.outbox.administration.check import Finding
from pillarbox.outbox.administration.checks.upkeep import Upkeep, read_upkeep
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.pauses import Pause, list_pauses
from pillarbox.outbox.administration.readers import consumer_of
from pillarbox.outbox.errors import UpkeepError
from pillarbox.outbox.observability.measures.backlog import (
    Backlog,
    Rate,
    read_backlog,
    read_rate,
)
from pillarbox.outbox.observability.measures.consumers import (
    ConsumerStatus,
    read_consumers,
)
from pillarbox.outbox.observability.measures.failures import (
    Blocked,
    DeadLetters,
    OpenJobs,
    read_blocked,
    read_dead_letters,
    read_jobs,
)
from pillarbox.outbox.observability.measures.pins import Pin, read_pins
from pillarbox.outbox.observability.measures.processes import Processes, read_processes
from pillarbox.outbox.observability.measures.reading import (
    Part,
    Reading,
    Scope,
    attempt,
)
from pillarbox.outbox.observability.measures.tables import Table, read_tables
from pillarbox.outbox.postgres.sql_files import load

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The state of messages, processes and partitions, as the database shows it.

    A part that wasn't requested, or that is missing, is None or empty.

    Attributes:
        at: the time of the measurement, by the server's clock.
        is_standby: whether this server is a standby, which doesn't show what holds the
            lanes of its primary.
        outbox: the unsettled messages.
        rate: how fast messages were published.
        jobs: the open jobs of each consumer that has any.
        pins: what keeps old snapshots or transactions in use, longest first.
        missing: the parts that couldn't be measured, and why.
    """

    at: datetime
    database: str
    is_standby: bool
    outbox: Backlog | None
    rate: Rate | None
    processes: Processes | None
    consumers: tuple[ConsumerStatus, ...]
    pauses: tuple[Pause, ...]
    blocked: Blocked | None
    dead_letters: tuple[DeadLetters, ...]
    jobs: tuple[OpenJobs, ...]
    tables: tuple[Table, ...]
    upkeep: Upkeep | None
    pins: tuple[Pin, ...]
    missing: tuple[Finding, ...]

    def pauses_of(self, consumer: str) -> list[Pause]:
        """Return what is paused of a consumer, or of one of its queues."""
        names = {None, consumer_of(consumer)}
        return [it for it in self.pauses if it.consumer in names]


def read_overview(
    connection: AdministrationConnection, scope: Scope | None = None
) -> Overview:
    """Measure the parts of a scope, in autocommit mode or in a transaction.

    For one thread. A part that fails, for example for lack of a privilege, is missing;
    the others are still measured.

    Raises:
        psycopg.Error: the connection was lost.
        UpkeepError: the database has no pillarbox schema.
    """
    row = connection.execute(load("outbox", "read_database")).fetchone()
    assert row is not None
    at, database, is_standby, has_schema = row
    if not has_schema:
        raise UpkeepError(
            f"the database {database} has no table outbox.message; run pillarbox "
            "migrate"
        )
    reading = Reading(connection, scope or Scope(), at.astimezone(UTC))
    missing: list[Finding] = []

    def part(name: Part, read: Callable[[Reading], T]) -> T | None:
        if name not in reading.scope.parts:
            return None
        found = attempt(
            connection,
            name,
            partial(read, reading),
            reading.scope.patience,
            reads_log=name == "blocked",
        )
        if not isinstance(found, Finding):
            return found
        missing.append(found)
        return None

    processes = part("processes", read_processes)
    running = None if processes is None else processes.consumers
    backlog = part("backlogs", read_backlog)
    consumers = part("consumers", partial(read_consumers, running=running))
    lags = [it.lag for it in consumers or () if it.is_reader]
    refused = None if consumers is None else _count_refused([backlog, *lags])
    letters = (
        part("dead_letters", partial(read_dead_letters, side=it))
        for it in reading.scope.sides
    )
    return Overview(
        at=reading.at,
        database=database,
        is_standby=is_standby,
        processes=processes,
        outbox=backlog,
        rate=part("rate", partial(read_rate, backlog=backlog)),
        consumers=consumers or (),
        pauses=part("consumers", lambda reading: list_pauses(reading.connection)) or (),
        # Reading the log takes time.
        blocked=Blocked()
        if refused == 0
        else part("blocked", lambda it: read_blocked(it.connection, it.scope.blocked)),
        dead_letters=tuple(it for it in letters if it is not None),
        jobs=part("jobs", read_jobs) or (),
        tables=part("tables", read_tables) or (),
        upkeep=part("upkeep", lambda reading: read_upkeep(reading.connection)),
        pins=part("pins", read_pins) or (),
        missing=tuple(missing),
    )


def _count_refused(backlogs: Sequence[Backlog | None]) -> int | None:
    """Return how many were refused; None if a count is missing or incomplete."""
    counts = [it.refused if it and it.is_complete else None for it in backlogs]
    return None if None in counts else sum(it or 0 for it in counts)
