"""Partitions: enough of them, none foreign or misnamed, all beginning at midnight."""

from collections import defaultdict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from psycopg.rows import class_row

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.replacement import Misfit, replacement
from outbox.postgres.sql_files import load

_FEW: Final = 3
"""Fewer are an error; a premake of 3 leaves 2 from midnight to the next upkeep."""
_OFF: Final = (
    "{} at {}, not at midnight UTC: something other than outbox.maintain() created it,"
    " in another time zone"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    parent_table: str
    partition: str
    schema: str
    aside: str
    control: str
    is_default: bool
    starts_at: datetime | None
    ends_at: datetime | None
    ahead: bool | None
    owner: str
    wanted_owner: str
    is_foreign: bool
    is_off: bool | None
    ends_off: bool
    is_misnamed: bool | None
    half_detached: bool | None


def check_partitions(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find missing, wrong and forgotten partitions."""
    misfits: defaultdict[str, dict[Misfit, str]] = defaultdict(dict)
    in_the_way, strays = set(), set()
    # A wrong partition may take the place of a missing one.
    for table, partition, start, end, follows in connection.execute(
        load("outbox", "list_strays")
    ):
        strays.add(partition)
        advice = (
            "move what you want to keep to a schema of your own"
            if follows is None
            else f"don't move it before those of {follows} are gone, which without it"
            " count as unsettled and may be delivered again"
        )
        yield _found(
            f"{partition} was detached from {table}, and no upkeep knows of it: queries"
            " don't see its rows. Attached again, it is dropped after its retention;"
            f" {advice}",
            f"SET ROLE {here.owner}; ALTER TABLE {table} ATTACH PARTITION {partition}"
            f" FOR VALUES FROM ('{start}') TO ('{end}'); RESET ROLE;",
        )
    for table, taken, aside, is_partition in connection.execute(
        load("outbox", "list_names_taken")
    ):
        if is_partition:
            in_the_way.add(taken)
        elif taken not in strays:
            yield _found(
                f"{taken} is no partition of {table}, but has the name of one that is"
                " missing",
                f"ALTER TABLE {taken} RENAME TO {aside};",
            )
    with connection.cursor(row_factory=class_row(_Judged)) as cursor:
        for judged in cursor.execute(load("outbox", "judge_partitions")):
            if why := _must_go(judged, in_the_way):
                misfit = Misfit(
                    judged.partition, judged.schema, judged.aside, judged.control
                )
                misfits[judged.parent_table][misfit] = why
            else:
                yield from _judge(judged)
    for table, reasons in misfits.items():
        yield _found("; ".join(reasons.values()), replacement(table, list(reasons)))
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
    for table, start, end, name in connection.execute(load("outbox", "list_gaps")):
        # The replacement of a misfit leaves no gap.
        if table not in misfits:
            yield _found(
                f"{table} has no partition from {start} to {end}: rows of that time"
                " will be refused",
                f"SET ROLE {here.owner}; CREATE TABLE {name} PARTITION OF {table}"
                f" FOR VALUES FROM ('{start}') TO ('{end}'); RESET ROLE;",
            )


def _must_go(judged: _Judged, in_the_way: Container[str]) -> str | None:
    """Return why a partition must be replaced; None if it can stay.

    One that is in use must be replaced only if it is in the way.
    """
    whose = f" (it belongs to {judged.owner})" if judged.is_foreign else ""
    subject = f"{judged.partition}{whose}"
    if judged.is_default:
        return (
            f"{subject} is a DEFAULT partition: no partition can be detached"
            " concurrently, and a row in it keeps its day from being created"
        )
    if judged.half_detached:
        return None
    if judged.is_off and judged.ahead:
        return f"{subject} {_OFF.format('begins', judged.starts_at)}"
    if judged.ends_off and judged.ahead:
        return f"{subject} {_OFF.format('ends', judged.ends_at)}"
    if judged.partition in in_the_way or (judged.is_misnamed and judged.ahead):
        return (
            f"{subject} begins at {judged.starts_at}, but has the name of another one:"
            " something other than outbox.maintain() created it, in another time zone"
        )
    return None


def _judge(judged: _Judged) -> Iterator[Finding]:
    table, partition = judged.parent_table, judged.partition
    if judged.is_foreign:
        yield _found(
            f"{partition} belongs to {judged.owner}, {table} to"
            f" {judged.wanted_owner}: the upkeep can't drop it",
            f"ALTER TABLE {partition} OWNER TO {judged.wanted_owner};",
        )
    if judged.is_off:
        yield _found(
            f"{partition} {_OFF.format('begins', judged.starts_at)}",
            "leave it: it is dropped after its retention",
        )
    if judged.half_detached:
        yield _found(
            f"{partition} is half detached, but not expired: queries don't see it",
            f"ALTER TABLE {table} DETACH PARTITION {partition} FINALIZE;"
            f" ALTER TABLE {table} ATTACH PARTITION {partition}"
            f" FOR VALUES FROM ('{judged.starts_at}') TO ('{judged.ends_at}');",
        )


def _found(finding: str, remedy: str) -> Finding:
    return Finding(
        check="partitions", severity=Severity.ERROR, finding=finding, remedy=remedy
    )
