"""Dead letters: grouped by reason, as a list, and one letter in full."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from psycopg.rows import dict_row
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.dead_letters.criteria import ListPosition
from pillarbox.outbox.dead_letters.inspect import DeadLetterTable
from pillarbox.outbox.dead_letters.letter import Status, Summary, decode_json
from pillarbox.outbox.dead_letters.statement import Schema, Statement, statement
from pillarbox.outbox.web.frame import Section, frame_of
from pillarbox.outbox.web.login import Viewer
from pillarbox.outbox.web.selection import (
    SIDES,
    STATUSES,
    Selection,
    read_place,
    write_place,
)

_OF_LIBRARIES: Final = re.compile(
    r"site-packages|/lib(?:64)?/python3|<frozen|/pillarbox/"
)
_MOST_GROUPS: Final = 50
_MOST_ROWS: Final = 50
_MAX_SHOWN: Final = 64 * 1024
_MAX_DECODED: Final = 1024 * 1024


class OnSide(NamedTuple):
    """A group or a dead letter, and its side."""

    side: Schema
    it: Any


class Groups(NamedTuple):
    """Dead letters by reason.

    Attributes:
        rows: the largest groups.
        total: the number of dead letters in all groups.
        more: how many groups are left out.
    """

    rows: list[OnSide]
    total: int
    more: int


def read_groups(
    connection: AdministrationConnection, selection: Selection, most: int
) -> Groups:
    """Count the matching dead letters by reason and origin, up to `most` of a side."""
    values = selection.criteria(max_rows=most).parameters()
    rows, total, more = [], 0, 0
    for side in selection.sides:
        with connection.cursor(row_factory=dict_row) as cursor:
            found = cursor.execute(statement(side, Statement.GROUP), values).fetchall()
        if found:
            rows += [OnSide(side, group) for group in found]
            total += found[0]["total"]
            more += found[0]["groups"] - len(found)
    rows.sort(key=lambda each: -each.it["letters"])
    return Groups(rows, total, more)


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the groups, and the newest dead letters."""
    selection, before = Selection.of(query), read_place(query.get("before", ""))
    groups = read_groups(connection, selection, _MOST_GROUPS)
    # To find none again would take as long as counting them.
    rows = _read_rows(connection, selection, before) if groups.total else []
    older = ""
    if len(rows) > _MOST_ROWS:
        last = rows[_MOST_ROWS - 1].it
        older = write_place(ListPosition(last.created_at, last.id))
    return {
        "selection": selection,
        "sides": SIDES,
        "statuses": STATUSES,
        "groups": groups,
        "rows": rows[:_MOST_ROWS],
        "older": older,
        "is_pending": selection.status == Status.PENDING,
    }


def _read_rows(
    connection: AdministrationConnection,
    selection: Selection,
    before: ListPosition | None,
) -> list[OnSide]:
    """Return a page of the list, and the next ones."""
    criteria = selection.criteria(before=before, max_rows=_MOST_ROWS + 1)
    rows = [
        OnSide(side, summary)
        for side in selection.sides
        for summary in DeadLetterTable(connection, side).summaries(criteria)
    ]
    rows.sort(key=lambda row: (row.it.created_at, row.it.id), reverse=True)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """The content of a message, for viewers who may see it.

    Attributes:
        hidden: why it isn't shown; None if it is.
        frame: the frame of the application that failed, from the stack trace.
    """

    hidden: str | None = None
    headers: tuple[tuple[str, str], ...] = ()
    payload: str = ""
    payload_bytes: int = 0
    stacktrace: str | None = None
    frame: str = ""


async def show_letter(request: Request) -> Response:
    """Show one dead letter."""
    frame, viewer = frame_of(request), request.state.viewer
    side = request.path_params["side"]
    id: UUID = request.path_params["id"]
    if side not in SIDES:
        raise HTTPException(404)

    def read(connection: AdministrationConnection) -> tuple[Any, ...]:
        row = connection.execute(
            statement(side, Statement.READ_SUMMARY), {"id": str(id)}
        ).fetchone()
        if row is None:
            raise HTTPException(
                404,
                f"{side}.dead_letter has no row {id}. Its partition may have been "
                "dropped, or the id is of the other side.",
            )
        *summary, version, priority, content_type, is_readable = row
        letter = Summary.of(summary)
        about = {"version": version, "priority": priority, "content_type": content_type}
        hidden = why_hidden(viewer, f"{side}.dead_letter", is_readable=is_readable)
        if hidden:
            return letter, about, Contents(hidden=hidden)
        whole = DeadLetterTable(connection, side).read(id)
        contents = show(
            whole.content_type,
            whole.headers,
            bytes(whole.payload),
            whole.error_stacktrace,
            frame.settings.redact,
        )
        return letter, about, contents

    letter, about, contents = await frame.database.run(read, request)
    return frame.render(
        request,
        "dead_letter.html",
        viewer=viewer,
        section=SECTION,
        title=f"Dead letter {str(id)[:8]}",
        side=side,
        letter=letter,
        **about,
        contents=contents,
        may_act=viewer.may_act and letter.status is Status.PENDING,
    )


def show(
    content_type: str,
    headers: object,
    payload: bytes,
    stacktrace: str | None,
    redact: Callable[[str], str],
) -> Contents:
    """Return the content of a message or a dead letter, after the redact hook."""

    def shown(text: str) -> str:
        try:
            text = redact(text)
        except Exception as error:  # noqa: BLE001 (the host's own code)
            return f"(not shown: the redact hook raised {type(error).__name__})"
        # JSON can contain half of a surrogate pair; a page can't.
        text = text.encode(errors="backslashreplace").decode()
        if len(text) > _MAX_SHOWN:
            return f"{text[:_MAX_SHOWN]}\n… {len(text) - _MAX_SHOWN:,} characters more"
        return text

    # Indented, a payload of 1 MB can become 100 MB, of which only the start is shown.
    is_small = len(payload) <= _MAX_SHOWN
    decoded = decode_json(content_type, payload) if is_small else None
    text = (
        payload[:_MAX_DECODED].decode(errors="backslashreplace")
        if decoded is None
        else json.dumps(decoded[0], indent=2, ensure_ascii=False)
    )
    named = headers if isinstance(headers, dict) else {"": headers}
    trace = stacktrace and shown(stacktrace)
    return Contents(
        headers=tuple((name, shown(str(value))) for name, value in named.items()),
        payload=shown(text),
        payload_bytes=len(payload),
        stacktrace=trace,
        frame=own_frame(trace or ""),
    )


def own_frame(stacktrace: str) -> str:
    """Return the last frame that is of no library, with the error; else nothing."""
    frames = re.split(r'^(?=  File ")', stacktrace, flags=re.MULTILINE)
    own = [it for it in frames[1:] if not _OF_LIBRARIES.search(it.split("\n", 1)[0])]
    if not own:
        return ""
    code = [it for it in own[-1].split("\n") if it.startswith("  ")]
    return "\n".join([*code, stacktrace.rstrip().split("\n")[-1]])


def why_hidden(viewer: Viewer, table: str, *, is_readable: bool) -> str:
    """Return why contents may not be shown, and what to do; empty if they may."""
    if not viewer.sees_payloads:
        return (
            f"{viewer.name} may not see them: add the word payloads to this viewer's "
            "line in the token file."
        )
    if not is_readable:
        return (
            "The page's database role may not read them: GRANT SELECT ON "
            f"{table} TO it."
        )
    return ""


SECTION: Final = Section(path="dead-letters", title="Dead letters", read=read_page)
