"""Messages: search for them, and show the life of one."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from psycopg.rows import dict_row
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.lane import LANES, PRIORITIES, lane_of
from pillarbox.outbox.observability.message_life import (
    Databases,
    Found,
    Life,
    State,
    Trace,
    read_id,
    read_trace,
)
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.web.dead_letters import Contents, show, why_hidden
from pillarbox.outbox.web.frame import Frame, Section, frame_of
from pillarbox.outbox.web.login import Viewer
from pillarbox.outbox.web.selection import check_choice, check_text

_MOST_ROWS: Final = 50
_WINDOW: Final = "1h"
_WINDOWS: Final = {
    "15m": ("the last 15 minutes", timedelta(minutes=15)),
    "1h": ("the last hour", timedelta(hours=1)),
    "24h": ("the last 24 hours", timedelta(hours=24)),
    "7d": ("the last 7 days", timedelta(days=7)),
}
_WAITS: Final = (State.READY, State.SCHEDULED, State.WAITING, State.BLOCKED)
_SETTLED: Final = (
    State.PUBLISHED,
    State.HANDLED,
    State.DEAD_LETTERED,
    State.CANCELLED,
)
_STATES: Final = ("any", "unsettled", *_WAITS, *_SETTLED)
# As in read_trace: forces index scans for a few rows, whatever the statistics say.
_PLAN: Final = "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off"
# Reads the index of a lane in its order, instead of sorting all that waits.
_PLAN_OF_WAITING: Final = "SET LOCAL enable_sort = off"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    """A viewer's search; empty text matches anything."""

    key: str
    topic: str
    tenant: str
    state: str
    window: str

    @classmethod
    def of(cls, query: Mapping[str, str]) -> "_Search":
        """Read the search from the query of an address.

        Raises:
            ConfigError: a field has an invalid value.
        """
        found = cls(
            key=query.get("key", ""),
            topic=query.get("topic", "").strip(),
            tenant=query.get("tenant", ""),
            state=query.get("state", "any"),
            window=query.get("window", _WINDOW),
        )
        check_text("key", found.key)
        check_text("topic", found.topic)
        check_text("tenant", found.tenant)
        check_choice("state", found.state, _STATES)
        check_choice("window", found.window, list(_WINDOWS))
        return found

    @property
    def since(self) -> datetime:
        """The start of the window."""
        return datetime.now(UTC) - _WINDOWS[self.window][1]

    @property
    def is_oldest_first(self) -> bool:
        """Whether only waiting messages are searched for, which are read by age."""
        return self.state in ("unsettled", *_WAITS)

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that both statements share."""
        is_prefix = self.topic.endswith("*")
        lanes: Sequence[int] = range(LANES)
        if self.key:
            lanes = [lane_of(self.key, UUID(int=0), it) for it in PRIORITIES]
        return {
            "lanes": list(lanes),
            "key": self.key or None,
            "since": self.since,
            "topic": None if is_prefix else self.topic or None,
            "topic_prefix": self.topic[:-1] if is_prefix else None,
            "tenant": self.tenant or None,
            "state": None if self.state in ("any", "unsettled") else self.state,
            "max_rows": _MOST_ROWS,
        }


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the messages that match."""
    search = _Search.of(query)
    return {
        "search": search,
        "rows": _read_rows(connection, search),
        "most": _MOST_ROWS,
        "states": _STATES,
        "windows": _WINDOWS,
        "is_oldest_first": search.is_oldest_first,
    }


def find_messages(
    connection: AdministrationConnection, query: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return up to 50 messages that match."""
    return _read_rows(connection, _Search.of(query))


def _read_rows(
    connection: AdministrationConnection, search: _Search
) -> list[dict[str, Any]]:
    values = search.parameters()
    if search.is_oldest_first:
        statement = load("outbox", "list_unsettled_messages")
        connection.execute(_PLAN_OF_WAITING)
    else:
        statement = load("outbox", "list_messages")
        connection.execute(_PLAN)
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, values, prepare=False).fetchall()


async def show_message(request: Request) -> Response:
    """Show the life of a message, and the tree of messages that it caused."""
    frame, viewer = frame_of(request), request.state.viewer
    assert isinstance(viewer, Viewer)
    given = request.path_params.get("id") or request.query_params.get("id", "")
    id = read_id(given.strip())

    def read(connection: AdministrationConnection) -> tuple[Trace, Contents]:
        away: list[str] = []
        with ExitStack() as others:
            databases = {frame.names[frame.database.url]: connection}
            for url, it in frame.others.items():
                try:
                    databases[frame.names[url]] = others.enter_context(it.transaction())
                except DatabaseUnavailableError as error:
                    away.append(str(error))
            found = read_trace(databases, id, away=away)
            return found, _contents(databases, found.life, frame, viewer)

    found, contents = await frame.database.run(read, request)
    return frame.render(
        request,
        "message.html",
        viewer=viewer,
        section=SECTION,
        title=f"Message {str(id)[:8]}",
        status=200 if found.found is Found.FOUND else 404,
        trace=found,
        life=found.life,
        contents=contents,
        now=datetime.now(UTC),
        Found=Found,
    )


def _contents(
    databases: Databases, life: Life, frame: Frame, viewer: Viewer
) -> Contents:
    if not life.envelopes:
        return Contents(hidden="The message no longer exists.")
    envelope = life.envelopes[0]
    connection = databases[envelope.database]
    row = connection.execute(
        "SELECT has_table_privilege('outbox.message', 'SELECT')"
    ).fetchone()
    assert row is not None
    hidden = why_hidden(viewer, "outbox.message", is_readable=row[0])
    if hidden:
        return Contents(hidden=hidden)
    content = connection.execute(
        load("outbox", "read_contents"),
        {"id": envelope.id, "created_at": envelope.created_at},
        prepare=False,
    ).fetchone()
    if content is None:
        return Contents(hidden="The message was dropped meanwhile.")
    content_type, headers, payload = content
    return show(content_type, headers, bytes(payload), None, frame.settings.redact)


SECTION: Final = Section(path="messages", title="Messages", read=read_page)
