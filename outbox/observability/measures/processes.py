"""The running processes, as they record themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from psycopg.rows import class_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.readers import list_receivers
from pillarbox.outbox.brokers.options import DIRECT
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.duration import write_duration
from pillarbox.outbox.lane import LANES
from pillarbox.outbox.observability.measures.reading import Reading
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, MAIN
from pillarbox.outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A relay or consumer that recorded within the last minute that it runs.

    Attributes:
        name: the consumer's name; the reader's, for a relay.
        host: the name of its host, its process id there, and its release, if known.
        role: its login.
        broker: where it publishes to or receives from, without credentials.
        failing_since: since when something has kept failing; None if nothing fails.
        reason: the last failure.
        blocked_keys: keys whose first message waits for another attempt.
        in_flight: batches that are being published, or running handlers.
        running_id: the message whose handler has been running for longest, if for more
            than a few seconds; one that is overdue comes first.
        running_due: when that handler is or was overdue; None: never.
        standing_by: the topics that another replica receives; None: none.
        counters: see `TopicCounters.as_json`.
    """

    kind: str
    name: str
    host: str
    role: str
    broker: str
    since: datetime
    failing_since: datetime | None
    reason: str | None
    blocked_keys: int
    in_flight: int
    running_id: UUID | None
    running_handler: str | None
    running_since: datetime | None
    running_due: datetime | None
    standing_by: str | None
    counters: Mapping[str, Any]

    def is_overdue(self, now: datetime) -> bool:
        """Whether the handler that has been running for longest is overdue."""
        return self.running_due is not None and self.running_due <= now

    def running(self, now: datetime) -> str | None:
        """Say which handler has been running for longest, if for long."""
        if self.running_since is None:
            return None
        age = write_duration(now - self.running_since)
        text = f"{self.running_handler} has been handling {self.running_id} for {age}"
        return f"{text} and is overdue" if self.is_overdue(now) else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """The running processes, and the lanes that no relay holds.

    A consumer records itself in the database of its handlers, so those with another
    database aren't here.

    Attributes:
        lanes: the number of lanes of the outbox.
        free: lanes that no relay holds.
        readers: the readers that need a relay, and where each publishes, without
            credentials; None before its first relay.
    """

    relays: tuple[Process, ...]
    consumers: tuple[Process, ...]
    lanes: int
    free: tuple[int, ...]
    readers: Mapping[str, str | None]

    @property
    def broker(self) -> str | None:
        """Where the relays of the main reader publish."""
        return self.readers.get(MAIN)

    @property
    def unserved(self) -> tuple[str, ...]:
        """The readers of which no relay is running."""
        running = {relay.name for relay in self.relays}
        return tuple(reader for reader in self.readers if reader not in running)


def read_processes(reading: Reading) -> Processes:
    """Read which processes run."""
    connection = reading.connection
    return Processes(
        relays=list_processes(connection, "outbox"),
        consumers=list_processes(connection, "inbox"),
        lanes=LANES,
        free=tuple(sorted({*range(LANES)} - read_held_lanes(reading))),
        readers=read_relayed(reading),
    )


def read_relayed(reading: Reading) -> dict[str, str | None]:
    """Return the readers whose messages relays publish, and where."""
    receivers = list_receivers(reading.connection)
    return {it: broker for it, broker in receivers.items() if broker != DIRECT}


def list_processes(
    connection: AdministrationConnection, side: Schema
) -> tuple[Process, ...]:
    """Read the relays (`outbox`) or the consumers (`inbox`) of this database."""
    statement = load("outbox", "list_processes").replace("{schema}", side)
    with connection.cursor(row_factory=class_row(Process)) as cursor:
        return tuple(cursor.execute(statement))


def read_held_lanes(reading: Reading) -> set[int]:
    """Return the lanes of the outbox that relays hold."""
    rows = reading.rows(load("outbox", "list_held_lanes"), lock_class=LOCK_CLASS)
    return {row["lane"] for row in rows}
