"""Scheduled messages: list those that aren't due, cancel them, and move them."""

from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.scheduled import (
    Change,
    cancel_message,
    list_scheduled,
    move_message,
)
from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.observability.message_life import read_id
from pillarbox.outbox.web.frame import Section, base_of, frame_of
from pillarbox.outbox.web.selection import check_text

_MOST_ROWS: Final = 100


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the next scheduled messages that match."""
    search = {name: query.get(name, "") for name in ("topic", "key", "tenant")}
    for name, value in search.items():
        check_text(name, value)
    chosen: dict[str, Any] = {name: value or None for name, value in search.items()}
    rows = list_scheduled(connection, **chosen, limit=_MOST_ROWS)
    return {"search": search, "rows": rows, "most": _MOST_ROWS}


async def cancel(request: Request) -> Response:
    """Cancel a scheduled message."""
    id, reason, _ = await _asked(request)
    done = await frame_of(request).store.run(lambda it: cancel_message(it, id, reason))
    return _show(request, done, is_done=done.is_cancelled)


async def move(request: Request) -> Response:
    """Cancel a scheduled message, and add its content for another time."""
    id, reason, to = await _asked(request)
    try:
        # The browser's field has no time zone.
        due_at = datetime.fromisoformat(to).replace(tzinfo=UTC)
    except ValueError:
        raise ConfigError(
            f"move to {shorten(to)}: choose a date and a time above the list"
        ) from None
    if due_at < datetime.now(UTC):
        raise ConfigError(f"move to {to} UTC: is past; choose a later time")
    done = await frame_of(request).store.run(
        lambda it: move_message(it, id, due_at, reason)
    )
    return _show(request, done, is_done=done.new_id is not None)


async def _asked(request: Request) -> tuple[UUID, str, str]:
    """Return the message, the reason with the viewer's name, and the new time."""
    viewer, form = await frame_of(request).acting(request)
    why = form.get("why", "").strip()
    check_text("why", why)
    reason = f"by {viewer.name}: {why}" if why else f"by {viewer.name}"
    return read_id(form.get("id", "")), reason, form.get("to", "")


def _show(request: Request, done: Change, *, is_done: bool) -> Response:
    if not is_done:
        raise ConfigError(done.text)
    return RedirectResponse(
        f"{base_of(request)}/message?id={done.new_id or done.id}", 303
    )


SECTION: Final = Section(path="scheduled", title="Scheduled", read=read_page)
