"""Counts for each minute of the last hour, which the page draws."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from outbox.administration.connection import AdministrationConnection
from outbox.dead_letters.statement import Schema
from outbox.observability.measures.reading import Scope, limit
from outbox.postgres.sql_files import load


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Counts for each of the last minutes, oldest first.

    If a minute has many rows, its count is extrapolated from the rate of the first
    ones.

    Attributes:
        until: when the last minute ended, by the server's clock.
        added: messages that were added, by the moment in their id.
        published: messages that were published, of those added in the last 25 hours.
        handled: messages with a receipt, by consumer, in the minute in which they were
            added.
        dead_lettered: dead letters, by side.
    """

    until: datetime
    added: tuple[float, ...]
    published: tuple[float, ...]
    handled: Mapping[str, tuple[float, ...]]
    dead_lettered: Mapping[Schema, tuple[float, ...]]


def read_history(
    connection: AdministrationConnection, minutes: int = 60, *, most: int = 200
) -> History:
    """Count messages and dead letters in each of the last full minutes.

    Args:
        most: the most rows counted per minute.

    Raises:
        psycopg.Error: the history can't be read, for example for lack of a privilege.
    """
    found: dict[tuple[str, str | None], list[float]] = {}
    with connection.transaction():
        limit(connection, Scope().patience)
        until = read_minute(connection)
        rows = connection.execute(
            load("outbox", "measure_history"), {"minutes": minutes, "most": most}
        )
        for series, name, minute, messages in rows:
            of_series = found.setdefault((series, name), [0.0] * minutes)
            of_series[minutes - 1 - minute] = messages
    nothing = [0.0] * minutes
    schemas: tuple[Schema, ...] = ("outbox", "inbox")
    return History(
        until=until,
        added=tuple(found.get(("added", None), nothing)),
        published=tuple(found.get(("published", None), nothing)),
        handled={
            name: tuple(messages)
            for (series, name), messages in found.items()
            if series == "handled" and name is not None
        },
        dead_lettered={
            side: tuple(found.get(("dead_lettered", side), nothing)) for side in schemas
        },
    )


def read_minute(connection: AdministrationConnection) -> datetime:
    """Return the start of the current minute, where a history ends."""
    ((began,),) = connection.execute(load("outbox", "find_minute")).fetchall()
    assert isinstance(began, datetime)
    return began
