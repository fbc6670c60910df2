"""The positions of a lane, day by day, from a claim to its settlement.

A claim reads the rows of several days in one snapshot, in order of seq. So in memory
the positions of these days advance together. A settlement stores only those of the days
to which its messages belong, beside the messages, and is dropped with them. A day that
a claim doesn't read keeps its position, whatever its rows.

Settlements of a lane are numbered. Each also stores the positions of a day of the one
before, the *fence*, with its own number, which is unique within the lane and day. So of
two processes that both believe to own the lane, one can settle, and the other one must
take over again.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby, repeat
from operator import itemgetter
from typing import Final, NamedTuple, Self

from pillarbox.outbox.log.hidden import Floors, Hidden
from pillarbox.outbox.log.position import Position, Snapshot

# Each claim asks each lane, and these are no calls of Python.
_DAY: Final = itemgetter(0)
_POSITION: Final = itemgetter(1)


class Day(NamedTuple):
    """The bounds of a partition."""

    starts_at: datetime
    ends_at: datetime


class Stored(NamedTuple):
    """A row of the table of positions, for one reader and lane."""

    day: Day
    number: int
    position: Position


class Part(NamedTuple):
    """One part of a claim in a lane: the uncovered rows above `start` in a time range.

    If a hidden transaction has ended, also rows above its floor.
    """

    oldest: datetime
    newest: datetime
    start: int
    position: Position


class Progress(NamedTuple):
    """How far a reader has read a lane. Immutable: each step returns a new one."""

    days: tuple[tuple[Day, Position], ...]
    """The days that claims read, in order."""
    number: int
    """The number of the last settlement; 0 if there was none."""
    fence: frozenset[Day]
    """Days whose positions the next settlement stores, even if it has no message of
    theirs. All that were stored with a late part belong to them, so that the late parts
    of a lane always have the same snapshot."""
    snapshot: Snapshot
    """That of the last look as of now, by a claim or the takeover: every row visible in
    it is covered, or a claim that starts as `parts` says will find it."""
    next_xid: int
    """The next id, read after that look."""
    as_of: Snapshot | None = None
    """The snapshot of the late parts. Until they are complete, claims read only what is
    visible in it: otherwise late rows could arrive between two claims, in rows that the
    first one has passed."""

    late: int | None = None
    """The lowest seq of the rows at or below their position that the takeover has found
    not covered. Until a claim has looked as of now, claims start there."""

    @classmethod
    def take_over(
        cls,
        days: Mapping[Day, Position],
        stored: Iterable[Stored],
        snapshot: Snapshot,
        next_xid: int,
        lowest: Mapping[Day, int],
    ) -> Self:
        """Continue where the last owner settled.

        Args:
            days: those to be read, each with the reader's position before it has
                stored any. If it has stored none, all of them are the fence: each
                process that settles messages of the lane reads at least one, too.
            stored: the last stored row of each day.
            snapshot: the snapshot in which `stored` and `lowest` were read.
            next_xid: the next id, read after the snapshot.
            lowest: the lowest row of each day that isn't covered.
        """
        rows = {row.day: row for row in sorted(stored)}
        number = max((row.number for row in rows.values()), default=0)
        fence = fence_of(rows.values())
        as_of = {rows[day].position.late_snapshot for day in fence} - {None}
        positions = {
            day: rows[day].position if day in rows else start
            for day, start in sorted(days.items())
        }
        late = [seq for day, seq in lowest.items() if seq <= positions[day].up_to]
        if not as_of:
            # Days without an uncovered row continue together.
            top = max(position.up_to for position in positions.values())
            for day in positions.keys() - lowest.keys():
                positions[day] = Position(top, snapshot)
        return cls(
            tuple(positions.items()),
            number,
            fence or frozenset(days),
            snapshot,
            next_xid,
            as_of.pop() if as_of else None,
            min(late, default=None),
        )

    def day_of(self, first: datetime, last: datetime | None = None) -> Day | None:
        """Return the day with these moments, among those that claims read."""
        index = bisect_right(self.days, first, key=lambda day: day[0].starts_at)
        day = self.days[index - 1][0] if index else None
        return day if day is not None and (last or first) < day.ends_at else None

    def parts(self) -> Sequence[Part]:
        """Return what a claim reads: one part if all days have the same position."""
        parts = []
        for position, same in groupby(self.days, _POSITION):
            days = [*same]
            start = position.late_up_to
            if start is None:
                start = position.up_to
                if self.late is not None:
                    start = min(start, self.late - 1)
            first, last = days[0][0].starts_at, days[-1][0].ends_at
            parts.append(Part(first, last, start, position))
        return parts

    def find_hidden(self, floors: Floors) -> Hidden | None:
        """Return the transactions whose end makes claims start lower.

        There are none while claims continue as of an older snapshot.
        """
        return None if self.as_of is not None else floors.find_hidden(self.snapshot)

    def looked(self, late: int | None, snapshot: Snapshot, next_xid: int) -> Self:
        """Return the progress after a search for rows that committed late.

        Args:
            late: the lowest row at or below the position of its day that isn't covered.
            snapshot: the snapshot of the search.
            next_xid: the next id, read after the snapshot.
        """
        return self._replace(late=late, snapshot=snapshot, next_xid=next_xid)

    def claimed(
        self, up_to: int, snapshot: Snapshot, next_xid: int, *, is_cut: bool
    ) -> Self:
        """Return the progress as soon as the messages of a claim are settled.

        If the claim found nothing, the memory can advance without a settlement.

        Args:
            up_to: the seq of the last row that the claim read; -1 if it read none.
            snapshot: the snapshot of the claim's statement.
            next_xid: the next id, read after the snapshot.
            is_cut: whether a limit ended the claim before it had read all rows.
        """
        if not is_cut:
            for _, position in self.days:
                up_to = max(up_to, position.up_to)
            if self.as_of is None:
                # Most claims. No position gets a late part, so all are the same.
                read = Position(up_to, snapshot)
                days = tuple(zip(map(_DAY, self.days), repeat(read)))
                return type(self)(days, self.number, self.fence, snapshot, next_xid)
        as_of = self.as_of or snapshot
        days = tuple(
            (day, position.extend(up_to, as_of)) for day, position in self.days
        )
        is_late = any(position.late_up_to is not None for _, position in days)
        after = self._replace(days=days, as_of=as_of if is_late else None)
        if self.as_of is not None:
            return after
        return after._replace(snapshot=snapshot, next_xid=next_xid, late=None)

    def move_fence(self, day: Day) -> tuple[Self, list[Stored]] | None:
        """Return what to store if the last settlement is of another day, else None.

        Otherwise claims would read that day as long as the lane has no message.
        """
        if not self.number or self.as_of is not None or day in self.fence:
            return None
        return self.settle([day])

    def settle(self, days: Collection[Day]) -> tuple[Self, list[Stored]]:
        """Return what to store in the transaction of a settlement, and what follows.

        Args:
            days: those of the settled messages.
        """
        rows = [
            Stored(day, self.number + 1, position)
            for day, position in self.days
            if day in days or day in self.fence
        ]
        return self._replace(number=self.number + 1, fence=fence_of(rows)), rows


def fence_of(rows: Collection[Stored]) -> frozenset[Day]:
    """Return the fence after the last of these settlements."""
    number = max((row.number for row in rows), default=0)
    last = sorted(row for row in rows if row.number == number)
    late = frozenset(row.day for row in last if row.position.late_up_to is not None)
    return late or frozenset(row.day for row in last[-1:])
