"""Retention: overdue partitions, what holds them, and who else may drop partitions."""

from collections.abc import Iterator
from typing import Final

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.retention import read_policies
from outbox.duration import exact_duration
from outbox.postgres.late_messages import KEPT_FOR_LATE_MESSAGES, minimum_retention
from outbox.postgres.sql_files import load

_OPEN: Final = (
    "SELECT pid, usename, xact_start, query FROM pg_stat_activity"
    " WHERE xact_start < now() - interval '1 hour';  -- then: pillarbox maintain"
)
_CONDITION: Final = (
    "SELECT coalesce(unsettled, gate) FROM outbox.partition_policy"
    " WHERE parent_table = '{}';"
    "  -- fix the condition or the function, which fails"
)


_SETTLING: Final = {
    "outbox.message": "  -- a running relay settles them; see also: pillarbox blocked",
    "outbox.dead_letter": "  -- then: pillarbox dead-letters retry, or discard",
    "inbox.delivery": "  -- their running consumer acks them; if it is gone for good:"
    " docs/brokers/postgres.md, In production",
    "inbox.dead_letter": "  -- then: pillarbox dead-letters retry, or discard",
    "inbox.job": "  -- then: pillarbox cancel",
}


def check_retention(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Find partitions past their retention, and retentions that are too short."""
    for row in connection.execute(load("outbox", "list_late_partitions")):
        step, table, partition, unsettled, reason, statement, late, owner = row
        if step == "attach" and unsettled == 0:
            yield _found(
                Severity.WARNING,
                f"{partition} is detached, so that queries don't see its rows, but its"
                " retention isn't over",
                f"{statement};",
            )
        elif step in {"hold", "attach"}:
            if unsettled is not None:
                remedy = f"{statement};{_SETTLING.get(table, '')}"
            elif owner is not None:
                remedy = f"ALTER TABLE {partition} OWNER TO {owner};"
            else:
                remedy = _CONDITION.format(table)
            detached = (
                "" if step == "hold" else " and detached, so that queries don't see it"
            )
            yield _found(
                Severity.WARNING,
                f"{partition} is past its retention and held{detached}: {reason}",
                remedy,
            )
        elif late:
            yield _found(
                Severity.WARNING,
                f"{partition} should have been dropped hours ago; next step: {step}."
                " The upkeep isn't running, or a transaction has been open for long",
                _OPEN,
            )
    for policy in read_policies(connection):
        needed = minimum_retention()
        if policy.parent_table in KEPT_FOR_LATE_MESSAGES and policy.retention < needed:
            yield _found(
                Severity.WARNING,
                f"{policy.parent_table} is kept for {exact_duration(policy.retention)},"
                f" but a message can come back after {exact_duration(needed)}, by the"
                " defaults of delay and retries",
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
            f"pillarbox retention set inbox.receipt {days}d  # for future ones; handle"
            " the oldest PENDING ones in inbox.dead_letter by hand, and discard them",
        )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="retention", severity=severity, finding=finding, remedy=remedy)
