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
    """Find missing, foreign and forgotten partitions."""
    for table, partition in connection.execute(load("outbox", "list_strays")):
        yield _found(
            f"{partition} has the name of a partition of {table}, but is not attached,"
            " and no upkeep knows of it: queries don't see its rows",
            f"attach it to {table} if you detached it: its rows may still be needed;"
            " otherwise rename, move or drop it",
        )
    for table, partition, fault, is_half, start, end, owner in connection.execute(
        load("outbox", "list_odd_partitions")
    ):
        if is_half:
            remedy = (
                f"ALTER TABLE {table} DETACH PARTITION {partition} FINALIZE;"
                f" ALTER TABLE {table} ATTACH PARTITION {partition}"
                f" FOR VALUES FROM ('{start}') TO ('{end}');"
            )
        elif owner is not None:
            remedy = f"ALTER TABLE {partition} OWNER TO {owner};"
        else:
            remedy = (
                "in one transaction detach and rename it and the others of this table"
                f" that are not ours, call outbox.make_partitions('{table}') and, for"
                " rows of other days, outbox.make_partitions_at, insert the rows into"
                f" {table}, and drop what you renamed"
            )
        yield _found(
            f"{partition} of {table}{'' if is_half else ' is not ours'}: {fault}",
            remedy,
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
    for table, start, end in connection.execute(load("outbox", "list_gaps")):
        yield _found(
            f"{table} has no partition from {start} to {end}: rows of that time"
            " will be refused",
            f"create one for these bounds, as {here.owner}",
        )


def _found(finding: str, remedy: str) -> Finding:
    return Finding(
        check="partitions", severity=Severity.ERROR, finding=finding, remedy=remedy
    )
