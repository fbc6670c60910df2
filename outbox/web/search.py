"""One search for a message's id, key, topic or tenant, or the start of an id."""

import re
from typing import Any, Final
from urllib.parse import urlencode
from uuid import UUID

from psycopg.rows import dict_row
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.web.dead_letters import read_groups
from pillarbox.outbox.web.frame import base_of, frame_of
from pillarbox.outbox.web.messages import find_messages
from pillarbox.outbox.web.selection import Selection, check_text

_MOST_ROWS: Final = 20
_MOST_GROUPS: Final = 1
_LEAST_PART: Final = 6
_WHOLE: Final = 32
_WINDOWS: Final = {"key": "24h", "topic": "1h", "tenant": "1h"}
"""Messages are read: for a key those of its lanes, a sixteenth of all."""


async def search(request: Request) -> Response:
    """Show what a text is part of; if that is one thing, go there."""
    frame, viewer = frame_of(request), request.state.viewer
    text = request.query_params.get("q", "").strip()
    check_text("q", text)
    found = await frame.database.run(lambda it: _find(it, text), request)
    if len(found) == 1:
        return RedirectResponse(f"{base_of(request)}/{found[0][0]}", 303)
    return frame.render(
        request,
        "search.html",
        viewer=viewer,
        title=f"Search for {text}" if text else "Search",
        text=text,
        found=found,
    )


def _find(connection: AdministrationConnection, text: str) -> list[tuple[str, str]]:
    """Return addresses below the page's own, and what is there."""
    if not text:
        return []
    digits = text.replace("-", "").lower()
    is_id = re.fullmatch(rf"[0-9a-f]{{{_LEAST_PART},{_WHOLE}}}", digits) is not None
    is_whole = is_id and len(digits) == _WHOLE
    found = _find_ids(connection, digits) if is_id else []
    if found and is_whole:
        return found
    for name, window in _WINDOWS.items():
        query = {name: text, "window": window}
        rows = find_messages(connection, query)
        if rows:
            many = f"{len(rows)} or more" if len(rows) >= _MOST_ROWS else len(rows)
            found.append(
                (f"messages?{urlencode(query)}", f"{name}: {many} messages, {window}")
            )
        query = {name: text, "status": "ANY"}
        total = read_groups(connection, Selection.of(query), _MOST_GROUPS).total
        if total:
            address = f"dead-letters?{urlencode(query)}"
            found.append((address, f"{name}: {total:,} dead letters"))
    if is_whole and not found:  # its day may have been dropped
        return [(f"message?id={UUID(digits)}", f"Message {UUID(digits)}")]
    return found


def _find_ids(
    connection: AdministrationConnection, digits: str
) -> list[tuple[str, str]]:
    values: dict[str, Any] = {
        "first": UUID(digits.ljust(_WHOLE, "0")),
        "last": UUID(digits.ljust(_WHOLE, "f")),
        "max_rows": _MOST_ROWS,
    }
    with connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(load("outbox", "find_ids"), values).fetchall()
    return [
        (f"message?id={it['id']}", f"Message {it['id']} {it['topic']}")
        if it["kind"] == "message"
        else (
            f"dead-letters/{it['kind']}/{it['id']}",
            f"Dead letter {it['id']} {it['topic']}",
        )
        for it in rows
    ]
