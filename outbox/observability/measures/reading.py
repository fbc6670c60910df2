"""A measurement of the database: its scope, and how its statements are run."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any, Final, Literal, LiteralString, TypeAlias, TypeVar, get_args

import psycopg
from psycopg.rows import class_row, dict_row

from pillarbox.outbox.administration.check import Finding, error, unknown
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.dead_letters.statement import Schema
from pillarbox.outbox.duration import write_duration
from pillarbox.outbox.errors import message_of
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.postgres.sql_files import load

Part: TypeAlias = Literal[
    "backlogs",
    "rate",
    "processes",
    "consumers",
    "blocked",
    "dead_letters",
    "jobs",
    "tables",
    "upkeep",
    "pins",
]
NEW: Final = timedelta(hours=24)
"""The window in which a dead letter counts as new."""
PARTS: Final[Sequence[Part]] = get_args(Part)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """The extent of a measurement.

    Attributes:
        parts: the parts to measure; the others are empty.
        sides: whose dead letters to measure.
        window: the window of the rates and latencies.
        per_lane: the most messages counted in a lane.
        rows: the most dead letters, jobs and receipts counted.
        blocked: the most refused messages listed, oldest first.
        reasons: the most reasons of dead letters listed, most frequent first.
        pins_from: how long a transaction must have been open to be listed.
        pins_behind: how many transactions one must lie behind to be listed, if this
            role can't see how long it has been open.
        patience: how long a part can take; if it takes longer, it is missing.
    """

    parts: Collection[Part] = PARTS
    sides: Collection[Schema] = ("outbox", "inbox")
    window: timedelta = timedelta(minutes=5)
    per_lane: int = 500
    rows: int = 10_000
    blocked: int = 20
    reasons: int = 10
    pins_from: timedelta = timedelta(minutes=1)
    pins_behind: int = 1_000_000
    patience: timedelta = timedelta(seconds=5)


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement. For one thread.

    Attributes:
        at: the time of the measurement, by the server's clock.
    """

    connection: AdministrationConnection
    scope: Scope
    at: datetime

    def rows(self, statement: LiteralString, **values: object) -> list[dict[str, Any]]:
        """Return the rows of a statement, by the names of their columns."""
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(statement, values or None).fetchall()

    def rows_of(
        self, kind: type[T], statement: LiteralString, **values: object
    ) -> tuple[T, ...]:
        """Return the rows of a statement as objects whose fields are its columns."""
        with self.connection.cursor(row_factory=class_row(kind)) as cursor:
            return tuple(cursor.execute(statement, values or None))


def attempt(
    connection: AdministrationConnection,
    name: str,
    read: Callable[[], T],
    patience: timedelta | None,
    *,
    reads_log: bool = False,
) -> T | Finding:
    """Return what `read` returns, or why this role or this server can't do it.

    Args:
        name: of the part or check.
        patience: how long it can take; None for any time, outside a transaction.
        reads_log: whether to let it read a table sequentially.

    Raises:
        psycopg.Error: the connection was lost.
    """
    try:
        if patience is None:
            return read()
        with connection.transaction():
            limit(connection, patience, reads_log=reads_log)
            return read()
    except psycopg.errors.QueryCanceled:
        took = "" if patience is None else f" than {write_duration(patience)}"
        problem = unknown(
            f"took longer{took}",
            "wait until the server is less busy, or run pillarbox doctor",
        )
    except psycopg.errors.InsufficientPrivilege as caught:
        problem = unknown(
            f"this role lacks privileges: {caught.diag.message_primary}",
            remedy_of(
                caught,
                "connect as a superuser or as a member of pillarbox_monitor and"
                " pg_monitor",
            ),
        )
    except (
        psycopg.errors.UndefinedTable,
        psycopg.errors.UndefinedFunction,
        psycopg.errors.UndefinedColumn,
        psycopg.errors.InvalidSchemaName,
    ) as caught:
        problem = error(
            f"part of the schema is missing: {caught.diag.message_primary}",
            "pillarbox migrate  # if the error remains, run the object's statement"
            " from pillarbox migrate --sql, as the tables' owner",
        )
    except psycopg.Error as caught:
        if caught.sqlstate is None or connection.closed:
            raise
        problem = unknown(message_of(caught), "run pillarbox doctor")
    return replace(problem, check=name)


def limit(
    connection: AdministrationConnection,
    patience: timedelta,
    *,
    reads_log: bool = False,
) -> None:
    """Limit the time of this transaction's statements, and their choice of plans.

    Args:
        reads_log: whether to let them read a table sequentially.
    """
    milliseconds = int(patience.total_seconds() * 1000)
    connection.execute(
        load("outbox", "limit_reading"),
        {"patience": f"{milliseconds}ms", "seqscan": "on" if reads_log else "off"},
    )
