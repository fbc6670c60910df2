"""Jobs: show the jobs of long handlers, and cancel them."""

from typing import Any, Final
from uuid import UUID

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.sides import Jobs, load_sides
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.web.frame import Section, base_of, frame_of
from pillarbox.outbox.web.selection import check_choice, check_text

_MOST_ROWS: Final = 100


def _jobs() -> Jobs:
    (jobs,) = (side.jobs for side in load_sides("inbox"))
    assert jobs is not None
    return jobs


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the jobs of a consumer in some states."""
    jobs = _jobs()
    chosen, consumer = query.get("state", "open"), query.get("consumer", "")
    choices = ("open", "any", *jobs.states)
    check_choice("state", chosen, choices)
    check_text("consumer", consumer)
    states = {"open": jobs.open_states, "any": jobs.states}.get(chosen, (chosen,))
    rows = jobs.read(connection, consumer or None, states, _MOST_ROWS)
    return {
        "jobs": rows,
        "most": _MOST_ROWS,
        "states": choices,
        "open_states": jobs.open_states,
        "chosen": chosen,
        "consumer": consumer,
    }


async def cancel(request: Request) -> Response:
    """Request that a job be cancelled."""
    frame = frame_of(request)
    viewer, form = await frame.acting(request)
    consumer, _, text = form.get("job", "").rpartition(" ")
    try:
        id = UUID(text)
    except ValueError:
        raise ConfigError("no job selected: use a button in the list") from None
    check_text("consumer", consumer)
    reason = f"cancelled by {viewer.name}"
    await frame.store.run(
        lambda connection: _jobs().cancel(connection, id, consumer, reason)
    )
    return RedirectResponse(f"{base_of(request)}/jobs?state=any", 303)


SECTION: Final = Section(path="jobs", title="Jobs", read=read_page)
