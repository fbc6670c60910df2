"""The backlog of the outbox, and how fast it is published."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeAlias

from pillarbox.outbox.lane import LANES
from pillarbox.outbox.observability.measures.processes import (
    read_held_lanes,
    read_relayed,
)
from pillarbox.outbox.observability.measures.reading import Reading
from pillarbox.outbox.postgres.sql_files import load

_RECENT: Final = timedelta(days=1)
_DEFERRED_SHARE: Final = 4
_SETTLEMENTS: Final = 20
"""The most per lane from which the rate is measured."""
_MOST_GROUPS: Final = 10
_ALL: Final = ("", None)

_Place: TypeAlias = tuple[str, str | None]
"""A column and one of its values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogGroup:
    """The messages of a backlog that share a priority, a topic or a tenant.

    Attributes:
        name: the value they share; None for messages without a tenant.
        waited: how long the oldest due message has waited; None if none is due.
    """

    name: str | None
    messages: int
    waited: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Unsettled messages of the outbox, or of a consumer that reads it.

    Attributes:
        messages: the number counted; if `is_complete`, all of them.
        is_complete: whether the count ended before its limit; if not, there are more
            than were counted, in the groups as well.
        estimated: the approximate number; if `is_complete`, the number counted; None or
            the number counted if only that is known.
        ready: how many of those counted are due.
        scheduled: how many are not due yet.
        refused: how many were refused and will be tried again.
        blocked: how many wait behind another one of their key.
        waited: how long the oldest due one has waited; None if none is due.
        tenants: the tenants; empty if no message has one.
    """

    messages: int = 0
    is_complete: bool = True
    estimated: int | None = 0
    ready: int = 0
    scheduled: int = 0
    refused: int = 0
    blocked: int = 0
    waited: timedelta | None = None
    priorities: tuple[BacklogGroup, ...] = ()
    topics: tuple[BacklogGroup, ...] = ()
    tenants: tuple[BacklogGroup, ...] = ()

    @property
    def size(self) -> str:
        """How many messages wait, in words."""
        if self.is_complete:
            return f"{self.messages:,}"
        if self.estimated is None or self.estimated == self.messages:
            return f"more than {self.messages:,}"
        return f"about {self.estimated:,}"

    @property
    def summary(self) -> str:
        """How many messages wait, as a sentence."""
        if not self.messages:
            return "no backlog"
        return f"{self.size} {'waits' if self.size == '1' else 'wait'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How fast messages were published or handled in the last minutes.

    Attributes:
        per_second: messages per second; 0 if there were none.
        dead_lettered: dead letters per second; None if they aren't measured.
        median: the median of the time since a message was added; None if no such time
            is known.
        slow: the 95th percentile of that time.
    """

    window: timedelta
    per_second: float
    dead_lettered: float | None
    median: timedelta | None
    slow: timedelta | None


def read_backlog(reading: Reading) -> Backlog:
    """Count the unsettled messages that relays are to publish."""
    tally = _count(reading, [*read_relayed(reading)], apart=False)[None]
    return tally.sum(reading.at)


def read_lags(reading: Reading, consumers: Sequence[str]) -> dict[str, Backlog]:
    """Count the unsettled messages of each consumer that reads the outbox."""
    tallies = _count(reading, consumers, apart=True)
    return {name: tallies[name].sum(reading.at) for name in consumers}


def _count(
    reading: Reading, readers: Sequence[str], *, apart: bool
) -> Mapping[str | None, "Tally"]:
    tallies: dict[str | None, Tally] = defaultdict(
        lambda: Tally("priority", "topic", "tenant")
    )
    if not readers:
        return tallies
    for since, lanes, names in _find_days(reading, readers, apart=apart):
        for row in reading.rows(
            load("outbox", "count_uncovered"),
            readers=names,
            apart=apart,
            lanes=lanes,
            since=since,
            most=reading.scope.per_lane,
        ):
            tallies[row.pop("reader")].add(row)
    most = reading.scope.per_lane * (1 if apart else _DEFERRED_SHARE)
    entries = reading.rows(
        load("outbox", "list_deferred"), readers=list(readers), most=most
    )
    if not entries:
        return tallies
    moments = [it["created_at"] for it in entries]
    for row in reading.rows(
        load("outbox", "count_deferred"),
        readers=[it["reader"] if apart else None for it in entries],
        ids=[it["id"] for it in entries],
        moments=moments,
        lanes=[it["lane"] for it in entries],
        causes=[it["cause"] for it in entries],
        dues=[it["due_at"] for it in entries],
        first=min(moments),
        last=max(moments),
    ):
        tallies[row.pop("reader")].add(row)
    for reader in {it["reader"] for it in entries if it["is_more"]}:
        tallies[reader if apart else None].is_complete = False
    return tallies


def _find_days(
    reading: Reading, readers: Sequence[str], *, apart: bool
) -> Iterator[tuple[datetime, list[int], list[str]]]:
    """Yield the day from which to count, lanes, and readers.

    Opening all days takes much longer than looking for messages, so only recent
    days are opened if that is enough. A claim reads all days in order, so a reader
    with positions in recent days has nothing to count before them, in lanes with
    messages there. Other lanes have nothing either, if a relay holds them.
    """
    lanes, since = [*range(LANES)], _recent(reading)
    (row,) = reading.rows(
        load("outbox", "find_current_readers"), readers=list(readers), since=since
    )
    current: list[str] = row["readers"]
    if current:
        yield since, lanes, current
    beginning = datetime.min.replace(tzinfo=UTC)
    if others := [it for it in readers if it not in current]:
        yield beginning, lanes, others
    idle = {*lanes} - {*row["lanes"]}
    if current and not apart and (unheld := idle - read_held_lanes(reading)):
        yield beginning, [*unheld], current


def _recent(reading: Reading) -> datetime:
    """Return the start of the partition that holds the messages of a day ago."""
    since = reading.at - _RECENT
    (row,) = reading.rows(load("outbox", "find_recent_days"), since=since)
    starts_at: datetime | None = row["starts_at"]
    return since if starts_at is None else starts_at


def read_rate(reading: Reading, backlog: Backlog | None) -> Rate:
    """Measure how fast messages are published."""
    since = _recent(reading)
    if backlog is not None and backlog.waited is not None:
        since = min(since, reading.at - backlog.waited - _RECENT)
    (row,) = reading.rows(
        load("outbox", "measure_rate"),
        window=reading.scope.window,
        since=since,
        most=_SETTLEMENTS,
    )
    return Rate(
        window=reading.scope.window,
        per_second=row["published"] or 0.0,
        dead_lettered=row["dead_lettered"] or 0.0,
        median=row["median"],
        slow=row["slow"],
    )


class Tally:
    """Adds up counted rows, in all and for each value of some columns.

    Attributes:
        is_complete: whether everything was counted, unless a row says otherwise.
    """

    def __init__(self, *columns: str) -> None:
        self.is_complete = True
        self._columns = columns
        self._counts: dict[_Place, Counter[str]] = defaultdict(Counter)
        self._oldest: dict[_Place, datetime] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of count_uncovered.sql or count_deferred.sql, which is changed."""
        oldest = row.pop("oldest")
        places = [_ALL, *((column, row.pop(column)) for column in self._columns)]
        for place in places:
            self._counts[place].update(row)
            if oldest is not None:
                self._oldest[place] = min(oldest, self._oldest.get(place, oldest))

    def sum(self, now: datetime) -> Backlog:
        """Return the sums, and the largest groups of each column."""
        total = self._counts[_ALL]
        priorities, topics, tenants = (
            self._groups(column, now) for column in ("priority", "topic", "tenant")
        )
        return Backlog(
            messages=total["messages"],
            is_complete=self.is_complete and not total["more"],
            estimated=total["estimated"],
            ready=total["ready"],
            scheduled=total["scheduled"],
            refused=total["waiting"],
            blocked=total["blocked"],
            waited=self._waited(_ALL, now),
            priorities=priorities,
            topics=topics,
            tenants=tenants if any(it.name is not None for it in tenants) else (),
        )

    def _groups(self, column: str, now: datetime) -> tuple[BacklogGroup, ...]:
        groups = [
            BacklogGroup(
                name=place[1],
                messages=counts["messages"],
                waited=self._waited(place, now),
            )
            for place, counts in self._counts.items()
            if place[0] == column
        ]
        groups.sort(key=lambda it: (-it.messages, it.name or ""))
        return tuple(groups[:_MOST_GROUPS])

    def _waited(self, place: _Place, now: datetime) -> timedelta | None:
        oldest = self._oldest.get(place)
        return None if oldest is None else max(now - oldest, timedelta(0))
