"""Retention: what should be gone, what holds it, and who else might drop."""

from collections.abc import Iterator
from typing import Final

from psycopg import sql

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.retention import read_policies
from outbox.postgres.late_messages import KEPT_FOR_LATECOMERS, minimum_retention
from outbox.postgres.sql_files import load

_OPEN: Final = (
    "SELECT pid, usename, xact_start, query FROM pg_stat_activity"
    " WHERE xact_start < now() - interval '1 hour';  -- then: pillarbox maintain"
)
_CONDITION: Final = (
    "SELECT unsettled FROM outbox.partition_policy WHERE parent_table = '{}';"
    "  -- change the condition, which can't be run"
)


def check_retention(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Find partitions past their time, and receipts that go too soon."""
    for row in connection.execute(load("outbox", "list_late_partitions")):
        step, table, partition, unsettled, statement, late, owner = row
        if step == "attach" and unsettled == 0:
            yield _found(
                Severity.WARNING,
                f"{partition} is detached, where nobody sees its rows, and the"
                " retention keeps it",
                f"{statement};",
            )
        elif step in {"hold", "attach"}:
            many = "unknown" if unsettled is None else unsettled
            if unsettled is not None:
                remedy = f"{statement};"
            elif owner is not None:
                remedy = f"ALTER TABLE {partition} OWNER TO {owner};"
            else:
                remedy = _CONDITION.format(table)
            detached = "" if step == "hold" else " and detached, where nobody sees them"
            yield _found(
                Severity.WARNING,
                f"{partition} is past its retention and held{detached},"
                f" unsettled rows: {many}",
                remedy,
            )
        elif late:
            yield _found(
                Severity.WARNING,
                f"{partition} should be gone for hours; next step: {step}."
                " The upkeep does not run, or a transaction stays open",
                _OPEN,
            )
    for policy in read_policies(connection):
        needed = minimum_retention()
        if policy.parent_table in KEPT_FOR_LATECOMERS and policy.retention < needed:
            yield _found(
                Severity.WARNING,
                f"{policy.parent_table} is kept {policy.retention}, and a message can"
                f" come back for {needed}, by the defaults of delay and retries",
                f"pillarbox retention set {policy.parent_table} 14d",
            )
    lost, days = connection.execute(
        load("outbox", "count_lost_dead_letters")
    ).fetchone() or (0, None)
    if lost:
        yield _found(
            Severity.WARNING,
            f"{lost} dead letters of the inbox are older than the receipts that are"
            " kept: a retry can't tell whether they were handled before",
            f"pillarbox retention set inbox.receipt {days}d  # for those to come;"
            " handle by hand, and discard, the oldest that are PENDING in"
            " inbox.dead_letter",
        )


def check_configuration(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find tables that pg_partman forgot, neglects, or would drop days of by itself."""
    if here.partman is None:
        return
    query = sql.SQL(load("outbox", "list_configuration")).format(
        partman=sql.Identifier(here.partman)
    )
    for table, forgotten, retention, is_automatic in connection.execute(query):
        if forgotten:
            yield _found(
                Severity.ERROR,
                f"pg_partman does not know {table}: no partition will be made",
                f"SET ROLE {here.owner}; SELECT outbox.adopt_table('{table}');"
                " RESET ROLE;",
            )
            continue
        if retention is not None:
            yield _found(
                Severity.ERROR,
                f"pg_partman itself drops days of {table} after {retention},"
                " whether or not their rows are settled",
                f'UPDATE "{here.partman}".part_config SET retention = NULL'  # noqa: S608 - for a person to read
                f" WHERE parent_table = '{table}';",
            )
        if is_automatic:
            yield _found(
                Severity.WARNING,
                f"anybody's run_maintenance() makes partitions of {table}, too, which"
                " then are that role's, and shifted by its time zone",
                f'UPDATE "{here.partman}".part_config SET automatic_maintenance ='  # noqa: S608 - for a person to read
                f" 'off' WHERE parent_table = '{table}';  -- or, if you chose it:"
                " UPDATE outbox.partition_policy SET automatic = true",
            )

    for table, setting, found, wanted in connection.execute(
        load("outbox", "list_changed_settings")
    ):
        yield _found(
            Severity.WARNING,
            f"somebody changed pg_partman's {setting} of {table} to {found}; the upkeep"
            f" wants {wanted}",
            "pillarbox maintain  # puts it back, and reports it as a failure",
        )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="retention", severity=severity, finding=finding, remedy=remedy)
