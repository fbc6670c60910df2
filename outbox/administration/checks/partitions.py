"""Partitions: enough of them, and none that pillarbox would not have created."""

from collections.abc import Iterator
from typing import Final

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load

_FEW: Final = 3
"""Fewer are an error; a premake of 3 leaves 2 from midnight to the next upkeep."""


def check_partitions(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find missing partitions, and those that pillarbox would not have created."""
    for table, partition, why, remedy in connection.execute(
        load("outbox", "list_odd_partitions")
    ):
        yield Finding(
            check="partitions",
            severity=Severity.ERROR,
            finding=f"{partition} of {table} is not ours: {why}",
            remedy=remedy,
        )
    for (
        table,
        missing,
        first,
        ahead,
        premake,
        has_today,
        followed,
    ) in connection.execute(load("outbox", "list_missing_partitions")):
        few = ahead < min(_FEW, premake - 1)
        refused = followed is not None or not has_today or few
        yield Finding(
            check="partitions",
            severity=Severity.ERROR if refused else Severity.WARNING,
            finding=f"{table} lacks {missing} partitions, from {first:%Y-%m-%d} on"
            + ("" if has_today else ", and today's is among them: rows are refused")
            + (
                ""
                if followed is None
                else f": rows that {followed} has there can't be settled"
            ),
            remedy=f"SELECT outbox.make_partitions('{table}');",
        )
