"""The first page: what needs attention, and the flow of messages."""

from typing import Any, Final

from starlette.datastructures import QueryParams

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.doctor import examine_quickly
from pillarbox.outbox.duration import write_duration
from pillarbox.outbox.observability.measures.backlog import Backlog
from pillarbox.outbox.web.frame import Section


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the overview, and what needs attention."""
    del query
    overview, findings = examine_quickly(connection)
    processes = overview.processes
    return {
        "overview": overview,
        "findings": findings,
        "processes": processes,
        "handled": sum(it.rate.per_second for it in overview.consumers if it.rate),
        "backlog_text": backlog_text,
        "ahead": min((it.days_ahead for it in overview.tables), default=None),
        "held": sum(len(it.held) for it in overview.tables),
        "jobs": {
            "running": sum(it.running + it.cancelling for it in overview.jobs),
            "queued": sum(it.queued for it in overview.jobs),
            "abandoned": sum(it.abandoned for it in overview.jobs),
        },
    }


def backlog_text(backlog: Backlog | None) -> str:
    """Describe a backlog in a few words."""
    if backlog is None:
        return "unknown"
    if backlog.waited is None:
        return backlog.summary
    return f"{backlog.summary}, {write_duration(backlog.waited)}"


SECTION: Final = Section(path="overview", title="Overview", read=read_page)
