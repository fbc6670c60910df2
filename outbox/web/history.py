"""The last hour for the charts of the overview, from the counters of the processes.

It is kept in the memory of the page, from the first view on.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from operator import add, sub
from typing import Any, Final

import psycopg
from starlette.exceptions import HTTPException

from pillarbox.outbox.duration import brief_duration, write_rate
from pillarbox.outbox.errors import OutboxError
from pillarbox.outbox.observability.latency import LONG
from pillarbox.outbox.observability.measures.backlog import Backlog
from pillarbox.outbox.observability.measures.processes import Process
from pillarbox.outbox.observability.measures.reading import Scope
from pillarbox.outbox.observability.overview import Overview, read_overview
from pillarbox.outbox.web.database import Database

ALL: Final = ""
"""Of all topics and consumers; else `topic:NAME` or `consumer:NAME`."""
_EVERY: Final = 15.0
_MINUTE: Final = timedelta(minutes=1)
_MINUTES: Final = 60
_SCOPE: Final = Scope(parts=["backlogs", "processes", "consumers"])
_WIDTH: Final = 240
_HEIGHT: Final = 48


@dataclass(frozen=True, slots=True)
class Chart:
    """A line over the last hour; a minute without a value is a gap.

    Attributes:
        words: what it shows, for those who can't see it.
    """

    title: str
    words: str
    values: Sequence[float | None]

    @property
    def lines(self) -> Iterator[str]:
        """The points of each line without gaps, for SVG."""
        top = max(filter(None, self.values), default=1.0)
        points: list[str] = []
        for number, value in enumerate((*self.values, None)):
            if value is not None:
                x = number * _WIDTH / (_MINUTES - 1)
                y = _HEIGHT - 2 - value / top * (_HEIGHT - 4)
                points.append(f"{x:.1f},{y:.1f}")
            elif points:
                # A single point is drawn as a dot, by the round ends of its line.
                yield " ".join(points if points[1:] else points * 2)
                points = []


@dataclass(slots=True)
class _Minute:
    seconds: float = 0.0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    times: dict[str, list[int]] = field(default_factory=dict)
    backlog: Counter[str] = field(default_factory=Counter)


class History:
    """The counts of each minute of the last hour. For one event loop.

    Attributes:
        since: when the first measurement was taken; None: none was taken yet.
    """

    def __init__(self, database: Database) -> None:
        self.since: datetime | None = None
        self._database = database
        self._task: asyncio.Task[None] | None = None
        self._at = datetime.min.replace(tzinfo=UTC)
        self._before: dict[object, Mapping[str, Any]] = {}
        self._minutes: defaultdict[datetime, _Minute] = defaultdict(_Minute)

    def begin(self) -> None:
        """Measure from now on, until the event loop ends."""
        if self._task is None:
            self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        while True:
            # The sections of the page say what can't be read.
            with suppress(OutboxError, psycopg.Error, HTTPException):
                self.add(await self._database.run(lambda it: read_overview(it, _SCOPE)))
            await asyncio.sleep(_EVERY)

    def add(self, overview: Overview) -> None:
        """Add what has happened since the last measurement."""
        now, before = overview.at, self._before
        minute = self._minutes[now.replace(second=0, microsecond=0)]
        found = overview.processes
        self._before = {}
        for process in (*found.relays, *found.consumers) if found else ():
            key = process.kind, process.name, process.host, process.since
            self._before[key] = process.counters
            is_new = self.since is not None and process.since > self._at
            if key in before or is_new:
                # Those of a process of another version may have another form.
                with suppress(AttributeError, TypeError, ValueError):
                    self._count(minute, process, before.get(key, {}))
        minute.backlog.clear()
        self._wait(minute, "", overview.outbox)
        for consumer in overview.consumers:
            self._wait(minute, f"consumer:{consumer.name}", consumer.lag)
        if self.since is None:
            self.since = now
        else:
            minute.seconds += (now - self._at).total_seconds()
        self._at = now
        for old in [it for it in self._minutes if it < now - _MINUTES * _MINUTE]:
            del self._minutes[old]

    def _count(
        self, minute: _Minute, process: Process, before: Mapping[str, Any]
    ) -> None:
        verb = "published" if process.kind == "relay" else "handled"
        of = [ALL] if process.kind == "relay" else [ALL, f"consumer:{process.name}"]
        nothing = 0, 0, [0] * (len(LONG) + 1)
        for topic, (done, failed, times) in process.counters.items():
            done_before, failed_before, times_before = before.get(topic, nothing)
            new = list(map(sub, times, times_before))
            for name in (*of, f"topic:{topic}"):
                minute.counts[verb, name] += done - done_before
                minute.counts["failed", name] += failed - failed_before
                if process.kind != "relay":
                    known = minute.times.get(name, nothing[2])
                    minute.times[name] = list(map(add, known, new))

    def _wait(self, minute: _Minute, name: str, backlog: Backlog | None) -> None:
        if backlog is None:
            return
        for each in {ALL, name}:
            minute.backlog[each] += backlog.estimated or backlog.messages
        for group in backlog.topics:
            minute.backlog[f"topic:{group.name}"] += group.messages

    @property
    def names(self) -> set[str]:
        """The names for which it has charts."""
        minutes = self._minutes.values()
        counted = {name for it in minutes for _, name in it.counts}
        return counted.union(*(it.backlog for it in minutes))

    def charts(self, of: str) -> list[Chart]:
        """Return the charts about everything, a topic or a consumer."""
        last = self._at.replace(second=0, microsecond=0)
        if self.since is None:
            return []
        moments = [last - (_MINUTES - 1 - n) * _MINUTE for n in range(_MINUTES)]
        minutes = [self._minutes.get(it) for it in moments]

        def rates(verb: str) -> list[float | None]:
            return [
                it.counts[verb, of] / it.seconds if it and it.seconds else None
                for it in minutes
            ]

        of_measure: list[tuple[str, Sequence[float | None], Callable[[float], str]]] = [
            ("Published", rates("published"), write_rate),
            ("Handled", rates("handled"), write_rate),
            ("Failed", rates("failed"), write_rate),
            (
                "p95, commit to handled",
                [_p95(it.times.get(of, ())) if it else None for it in minutes],
                lambda it: brief_duration(timedelta(seconds=it)),
            ),
            (
                "Backlog",
                [float(it.backlog[of]) if it else None for it in minutes],
                lambda it: f"{it:,.0f}",
            ),
        ]
        return [
            Chart(title, _in_words(values, moments, write), values)
            for title, values, write in of_measure
        ]


def _in_words(
    values: Sequence[float | None],
    moments: Sequence[datetime],
    write: Callable[[float], str],
) -> str:
    known = [(value, at) for value, at in zip(values, moments, strict=True) if value]
    if not known:
        return "none"
    most, at = max(known)
    now = write(values[-1]) if values[-1] else "none"
    return f"{now} now, at most {write(most)} at {at:%H:%M} UTC"


def _p95(counts: Sequence[int]) -> float | None:
    rank, below = 0.95 * sum(counts), 0.0
    for bound, count in zip((*LONG, LONG[-1]), counts, strict=False):
        if count and count >= rank:
            return below + (bound - below) * rank / count
        rank -= count
        below = bound
    return None
