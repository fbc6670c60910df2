"""Partitions: enough ahead, none missing, none foreign, all from midnight UTC."""

from collections.abc import Iterator
from typing import Final

from outbox.administration import AdministrationConnection
from outbox.check import Finding, Names, Severity
from outbox.statement import load

_FEW: Final = 3


def check_partitions(
    connection: AdministrationConnection, names: Names
) -> Iterator[Finding]:
    """Find days without a partition, and partitions that are not as we make them."""
    # What is wrong may stand in the way of what is missing.
    for row in connection.execute(load("outbox", "judge_partitions")):
        yield from _judge(*row)
    for table, missing, first, ahead, has_today in connection.execute(
        load("outbox", "list_missing_partitions")
    ):
        refused = not has_today or ahead < _FEW
        yield Finding(
            check="partitions",
            severity=Severity.ERROR if refused else Severity.WARNING,
            finding=f"{table} lacks {missing} partitions from {first:%Y-%m-%d} on"
            + ("" if has_today else ", today's among them: rows are refused"),
            remedy=f"SELECT outbox.make_partitions('{table}');",
        )
    for table, start, end, name in connection.execute(load("outbox", "list_gaps")):
        yield _found(
            f"{table} has no partition from {start} to {end}: rows are refused then",
            f"SET ROLE {names.owner}; CREATE TABLE {name} PARTITION OF {table}"
            f" FOR VALUES FROM ('{start}') TO ('{end}'); RESET ROLE;",
        )


def _judge(
    table: str,
    partition: str,
    is_default: bool,
    starts_at: object,
    ends_at: object,
    ahead: bool,
    owner: str,
    wanted_owner: str,
    is_foreign: bool,
    is_off: bool | None,
    half_detached: bool | None,
) -> Iterator[Finding]:
    # In one transaction: no row may be lost if there is a row that no day takes.
    replace = (
        f"BEGIN; ALTER TABLE {table} DETACH PARTITION {partition};"  # noqa: S608 - for a person to read
        f" SELECT outbox.make_partitions('{table}');"
        f" INSERT INTO {table} SELECT * FROM {partition}; DROP TABLE {partition};"
        " COMMIT;"
    )
    if is_default:
        yield _found(
            f"{partition} is a DEFAULT partition: nothing can be detached concurrently,"
            " and a row in it blocks its day",
            replace,
        )
    if is_foreign:
        yield _found(
            f"{partition} belongs to {owner}, {table} to {wanted_owner}: the upkeep"
            " can't drop it",
            f"ALTER TABLE {partition} OWNER TO {wanted_owner};",
        )
    if is_off:
        yield _found(
            f"{partition} begins at {starts_at}, not at midnight UTC: something else"
            " than outbox.maintain() made it in another time zone",
            replace if ahead else "leave it: it goes with its retention",
        )
    if half_detached:
        yield _found(
            f"{partition} is half detached and not expired: its rows can't be seen",
            f"ALTER TABLE {table} DETACH PARTITION {partition} FINALIZE;"
            f" ALTER TABLE {table} ATTACH PARTITION {partition}"
            f" FOR VALUES FROM ('{starts_at}') TO ('{ends_at}');",
        )


def _found(finding: str, remedy: str) -> Finding:
    return Finding(
        check="partitions", severity=Severity.ERROR, finding=finding, remedy=remedy
    )
