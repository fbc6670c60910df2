"""The first page: the state at a glance, a picture of the flow, and the last hour."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, Final

import psycopg
from starlette.datastructures import QueryParams

from outbox.administration.connection import AdministrationConnection
from outbox.bounded_dict import BoundedDict
from outbox.duration import write_duration
from outbox.lane import BUCKETS, LANES, PRIORITIES
from outbox.observability.overview import (
    Backlog,
    ConsumerStatus,
    History,
    Overview,
    Processes,
    read_history,
    read_minute,
    read_overview,
)
from outbox.web.frame import Section

_RECENT_MINUTES: Final = 5
_MOST_DRAWN: Final = 5
_HEIGHT: Final = 270
_BOX: Final = 42
_MOST_DATABASES: Final = 8
_LATE: Final = timedelta(minutes=1)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """A process in the picture.

    Attributes:
        y: its upper edge.
        said: what it does, in a few words.
        rate: the messages per second that it publishes or handles.
        is_well: whether it runs as it should.
    """

    y: int
    name: str
    said: str
    rate: float
    is_well: bool

    @property
    def middle(self) -> float:
        """The height at which lines to it end."""
        return self.y + _BOX / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A lane in the picture, and whether a relay holds it."""

    x: int
    y: int
    lane: int
    is_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """The flow of messages, from writers through lanes and brokers to consumers.

    Attributes:
        added: messages added per second over the last 5 minutes; None if that can't be
            read.
    """

    height: int
    added: float | None
    published: float
    lanes: tuple[Cell, ...]
    held: int
    backlog: str
    is_late: bool
    relays: tuple[Box, ...]
    consumers: tuple[Box, ...]

    @staticmethod
    def width(rate: float) -> str:
        """Return the width of the line for a rate."""
        return f"{1.5 + 1.5 * math.log10(1 + rate):.1f}"


def read_page(
    connection: AdministrationConnection, query: QueryParams
) -> dict[str, Any]:
    """Read the overview and the last hour."""
    del query
    overview = read_overview(connection)
    history = _history(connection)
    return {
        "overview": overview,
        "history": history,
        "picture": draw(overview, history),
        "priorities": PRIORITIES,
        "sparks": list(_sparks(history)) if history else [],
        "backlog_said": backlog_said,
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
    for side, minutes in history.given_up.items():
        yield spark(f"Dead letters of the {side}", minutes)


def draw(overview: Overview, history: History | None) -> Picture:
    """Lay out the picture."""
    free = set(overview.processes.free) if overview.processes else set()
    rate = overview.rate.per_second if overview.rate else 0.0
    backlog = overview.outbox
    relays = list(_relays(overview.processes, rate))
    consumers = [
        (it.name, consumer_said(it), it.rate.per_second if it.rate else 0.0, _runs(it))
        for it in overview.consumers
    ]
    most = max(len(relays[: _MOST_DRAWN + 1]), len(consumers[: _MOST_DRAWN + 1]), 1)
    height = max(_HEIGHT, 50 + most * (_BOX + 10))
    return Picture(
        height=height,
        added=recent(history.added) if history else None,
        published=rate,
        lanes=tuple(
            Cell(
                x=lane % BUCKETS * 14,
                y=lane // BUCKETS * 34,
                lane=lane,
                is_held=lane not in free,
            )
            for lane in range(LANES)
        ),
        held=LANES - len(free),
        backlog=backlog_said(backlog),
        is_late=bool(backlog and backlog.waited and backlog.waited > _LATE),
        relays=_stack(relays, height),
        consumers=_stack(consumers, height),
    )


def _relays(
    processes: Processes | None, rate: float
) -> Iterator[tuple[str, str, float, bool]]:
    if processes is None:
        return
    held = sum(len(it.lanes) for it in processes.relays)
    for it in processes.relays:
        share = len(it.lanes) / held if held else 0.0
        yield it.name, f"{len(it.lanes)} lanes", rate * share, True
    if not processes.relays:
        yield "no relay", "nothing is published", 0.0, False


def _runs(consumer: ConsumerStatus) -> bool:
    return consumer.replicas is None or consumer.replicas > 0


def consumer_said(consumer: ConsumerStatus) -> str:
    """Describe in a few words what a consumer is doing."""
    if consumer.lag is None:
        return "of another broker"
    if not consumer.replicas:
        return f"not connected, {backlog_said(consumer.lag)}"
    return backlog_said(consumer.lag)


def backlog_said(backlog: Backlog | None) -> str:
    """Describe a backlog in a few words."""
    if backlog is None:
        return "unknown"
    if not backlog.messages:
        return "nothing waits"
    if backlog.is_complete:
        many = f"{backlog.messages:,}"
    elif backlog.estimated is None:
        many = f"more than {backlog.messages:,}"
    else:
        many = f"about {backlog.estimated:,}"
    said = f"{many} {'waits' if many == '1' else 'wait'}"
    if backlog.waited is not None:
        said += f", {write_duration(backlog.waited)}"
    return said


def _stack(
    boxes: Sequence[tuple[str, str, float, bool]], height: int
) -> tuple[Box, ...]:
    """Place boxes below each other, and merge those that don't fit into one."""
    drawn = list(boxes[:_MOST_DRAWN])
    if rest := boxes[_MOST_DRAWN:]:
        drawn.append(
            (
                f"and {len(rest)} more",
                "",
                sum(rate for _, _, rate, _ in rest),
                all(is_well for *_, is_well in rest),
            )
        )
    top = (height - len(drawn) * (_BOX + 10) + 10) // 2
    return tuple(
        Box(
            y=top + number * (_BOX + 10),
            name=name,
            said=said,
            rate=rate,
            is_well=is_well,
        )
        for number, (name, said, rate, is_well) in enumerate(drawn)
    )


SECTION: Final = Section(
    path="overview", title="Overview", shortcut="h", read=read_page
)
