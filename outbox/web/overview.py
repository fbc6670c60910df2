"""The first page: what needs attention, and the flow of messages."""

from typing import Any, Final

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.doctor import examine_quickly
from pillarbox.outbox.administration.pauses import change_pause
from pillarbox.outbox.duration import write_duration
from pillarbox.outbox.observability.measures.backlog import Backlog
from pillarbox.outbox.web.frame import Section, base_of, frame_of
from pillarbox.outbox.web.selection import check_text


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
        "pauses": overview.pauses,
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


async def pause(request: Request) -> Response:
    """Pause or resume a consumer or a topic."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request, "pause")
    for name in ("consumer", "topic", "why"):
        check_text(name, form.get(name, ""))
    kind = "resume" if request.url.path.endswith("/resume") else "pause"
    # Phones add a space to a word that they complete.
    consumer, topic, why = (
        form.get(name, "").strip() for name in ("consumer", "topic", "why")
    )
    await frame.store.run(
        lambda it: change_pause(
            it, kind, consumer or None, topic or None, why, viewer.name
        )
    )
    return RedirectResponse(f"{base_of(request)}/overview", 303)


SECTION: Final = Section(path="overview", title="Overview", read=read_page)
