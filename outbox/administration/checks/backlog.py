"""Messages that wait, and what vacuum or a detach waits for, as the status shows."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Final

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.checks.sessions import sees_all_sessions
from outbox.administration.connection import AdministrationConnection
from outbox.administration.retention import read_policies
from outbox.observability.overview import Part, Scope, read_overview

_PARTS: Final[tuple[Part, ...]] = ("processes", "backlogs", "blocked")
_SCOPE: Final = Scope(parts=_PARTS, patience=timedelta(minutes=1))
_WAITS: Final = frozenset({"relays", "backlogs"})


def check_backlog(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Find messages that have waited for too long, as `pillarbox status` does."""
    overview = read_overview(connection, _SCOPE)
    is_late = False
    if overview.outbox is not None and overview.outbox.waited is not None:
        is_late = any(
            overview.outbox.waited > policy.retention / 2
            for policy in read_policies(connection)
            if policy.parent_table == "outbox.message"
        )
    for found in overview.findings:
        if found.severity is Severity.HINT:
            continue  # nothing waits yet
        finding = replace(found, check="backlog")
        if is_late and found.check in _WAITS:
            finding = replace(
                finding,
                severity=Severity.ERROR,
                finding=f"{found.finding}, more than half its retention: its partition"
                " will be held",
            )
        yield finding


def check_pins(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Find what keeps vacuum from removing dead rows, or a detach from finishing."""
    scope = Scope(parts=["pins"], patience=timedelta(minutes=1))
    yield from read_overview(connection, scope).findings
    sees_all, role = sees_all_sessions(connection)
    if not sees_all:
        yield Finding(
            check="pins",
            severity=Severity.UNKNOWN,
            finding="this role can't see how long transactions of others have been"
            " open",
            remedy=f"GRANT pg_monitor TO {role};",
        )
