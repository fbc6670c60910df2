"""The first page: what needs attention, the flow of messages, and the last hour."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final

import psycopg
from starlette.datastructures import QueryParams

from outbox.administration.connection import AdministrationConnection
from outbox.administration.doctor import examine_quickly
from outbox.bounded_dict import BoundedDict
from outbox.duration import write_duration
from outbox.observability.measures.backlog import Backlog
from outbox.observability.measures.history import History, read_history, read_minute
from outbox.web.frame import Section

_RECENT_MINUTES: Final = 5
_MOST_DATABASES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Spark:
    """A line that shows one number for each minute of the last hour.

    Attributes:
        per_second: the rate over the last 5 minutes.
        points: the points of the line, in a box of 60 by 20.
    """

    title: str
    per_second: float
    highest: float
    total: float
    points: str


def spark(title: str, minutes: Sequence[float]) -> Spark:
    """Draw a series, with the newest minute on the right."""
    highest = max(minutes, default=0.0)
    return Spark(
        title=title,
        per_second=recent(minutes),
        highest=highest,
        total=sum(minutes),
        points=" ".join(
            f"{x},{19 - (18 * messages / highest if highest else 0):.1f}"
            for x, messages in enumerate(minutes)
        ),
    )


def recent(minutes: Sequence[float]) -> float:
    """Return the messages per second over the last 5 minutes."""
    last = minutes[-_RECENT_MINUTES:]
    return sum(last) / (60 * len(last)) if last else 0.0


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the overview, what needs attention, and the last hour."""
    del query
    overview, findings = examine_quickly(connection)
    history = _history(connection)
    processes = overview.processes
    return {
        "overview": overview,
        "findings": findings,
        "processes": processes,
        "history": history,
        "added": recent(history.added) if history else None,
        "handled": sum(it.rate.per_second for it in overview.consumers if it.rate),
        "sparks": list(_sparks(history)) if history else [],
        "backlog_text": backlog_text,
        "ahead": min((it.days_ahead for it in overview.tables), default=None),
        "held": sum(len(it.held) for it in overview.tables),
        "jobs": {
            "running": sum(it.running + it.cancelling for it in overview.jobs),
            "queued": sum(it.queued for it in overview.jobs),
            "abandoned": sum(it.abandoned for it in overview.jobs),
        },
    }


_HISTORIES: Final[BoundedDict[str, History]] = BoundedDict(_MOST_DATABASES)
_LOCK: Final = Lock()


def _history(connection: AdministrationConnection) -> History | None:
    """Return the last hour; None if this role can't read it, or it takes too long.

    The hour ends with the last complete minute, so it is read once a minute.
    """
    info = connection.info
    database = f"{info.user} {info.host} {info.port} {info.dbname} {info.options}"
    with _LOCK:
        found = _HISTORIES.get(database)
    if found is not None and found.until == read_minute(connection):
        return found
    try:
        with connection.transaction():
            history = read_history(connection)
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.QueryCanceled):
        return None
    with _LOCK:
        _HISTORIES[database] = history
    return history


def _sparks(history: History) -> Iterator[Spark]:
    yield spark("Added", history.added)
    yield spark("Published", history.published)
    for name, minutes in history.handled.items():
        yield spark(f"Handled by {name}", minutes)
    for side, minutes in history.dead_lettered.items():
        yield spark(f"Dead letters of the {side}", minutes)


def backlog_text(backlog: Backlog | None) -> str:
    """Describe a backlog in a few words."""
    if backlog is None:
        return "unknown"
    if not backlog.messages:
        return "nothing waits"
    text = f"{backlog.size} {'waits' if backlog.size == '1' else 'wait'}"
    if backlog.waited is not None:
        text += f", {write_duration(backlog.waited)}"
    return text


SECTION: Final = Section(path="overview", title="Overview", read=read_page)
