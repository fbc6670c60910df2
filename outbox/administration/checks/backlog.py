"""Messages that wait: no relay publishes them, or the broker rejects them."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Final

from outbox.administration.check import Finding, Installation, Severity
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
