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

from outbox.administration.check import Finding
from outbox.administration.checks.upkeep import Upkeep, read_upkeep
from outbox.administration.connection import AdministrationConnection
from outbox.administration.sides import load_sides
from outbox.dead_letters.statement import Schema
from outbox.errors import UpkeepError
from outbox.observability.measures.backlog import (
    Backlog,
    Rate,
    read_backlog,
    read_rate,
)
from outbox.observability.measures.consumers import ConsumerStatus, read_consumers
from outbox.observability.measures.failures import (
    BlockedSummary,
    DeadLetters,
    OpenJobs,
    read_blocked,
    read_dead_letters,
    read_jobs,
)
from outbox.observability.measures.pins import Pin, read_pins
from outbox.observability.measures.processes import Processes, read_processes
from outbox.observability.measures.reading import Part, Reading, Scope, attempt
from outbox.observability.measures.tables import Table, read_tables
from outbox.postgres.sql_files import load

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
    blocked: tuple[BlockedSummary, ...]
    dead_letters: tuple[DeadLetters, ...]
    jobs: tuple[OpenJobs, ...]
    tables: tuple[Table, ...]
    upkeep: Upkeep | None
    pins: tuple[Pin, ...]
    missing: tuple[Finding, ...]


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
            "this database has no table outbox.message; run pillarbox migrate"
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

    def sides(name: Part, read: Callable[..., T]) -> tuple[T, ...]:
        if name not in reading.scope.parts:
            return ()
        found = (
            part(name, partial(read, side=it))
            for it in load_sides(None)
            if it.schema in reading.scope.sides
        )
        return tuple(it for it in found if it is not None)

    processes = part("processes", read_processes)
    running = None if processes is None else processes.consumers
    backlog = part("backlogs", read_backlog)
    consumers = part("consumers", partial(read_consumers, running=running))
    refused: dict[Schema, int | None] = {"outbox": None, "inbox": None}
    if consumers is not None:
        lags = [(it.lag, it.is_reader) for it in consumers if it.is_subscribed]
        refused["outbox"] = _count_refused(
            [backlog, *(lag for lag, own in lags if own)]
        )
        refused["inbox"] = _count_refused([lag for lag, own in lags if not own])
    return Overview(
        at=reading.at,
        database=database,
        is_standby=is_standby,
        processes=processes,
        outbox=backlog,
        rate=part("rate", partial(read_rate, backlog=backlog)),
        consumers=consumers or (),
        blocked=sides("blocked", partial(read_blocked, refused=refused)),
        dead_letters=sides("dead_letters", read_dead_letters),
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
