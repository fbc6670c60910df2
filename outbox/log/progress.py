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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import NamedTuple, Self

from outbox.log.hidden import Floors, find_hidden
from outbox.log.position import Position, Snapshot


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
    """What a claim reads of a lane: a time range, rows above `start` not yet covered.

    If a transaction has ended that was hidden, rows above its floor, too.
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
        late: int | None,
    ) -> Self:
        """Continue where the last owner settled.

        Args:
            days: those to be read, each with the reader's position before it has
                stored any.
            stored: the last stored row of each day.
            snapshot: the snapshot in which `stored` and `late` were read.
            next_xid: the next id, read after the snapshot.
            late: see the attribute; None if there is no such row.
        """
        rows = {row.day: row for row in sorted(stored)}
        number = max((row.number for row in rows.values()), default=0)
        last = [row for row in rows.values() if row.number == number]
        as_of = {row.position.late_snapshot for row in last} - {None}
        return cls(
            tuple(
                (day, rows[day].position if day in rows else days[day])
                for day in sorted(days)
            ),
            number,
            _fence(last) or frozenset([min(days)]),
            snapshot,
            next_xid,
            as_of.pop() if as_of else None,
            late,
        )

    def read_days(self, days: Mapping[Day, Position], late: int | None) -> Self:
        """Read these days from now on.

        Args:
            days: each with its stored position, which counts if the day has not been
                read so far. The fence must be among them, unless it was dropped.
            late: as for `take_over`, in the days that have not been read so far.
        """
        known = dict(self.days)
        lowest = [seq for seq in (self.late, late) if seq is not None]
        return self._replace(
            days=tuple((day, known.get(day, days[day])) for day in sorted(days)),
            late=min(lowest, default=None),
        )

    def parts(self) -> Iterator[Part]:
        """Yield what a claim must read: one part if all days have the same position."""
        for position, days in groupby(self.days, lambda day: day[1]):
            (first, _), *_ = same = list(days)
            start = position.late_up_to
            if start is None:
                start = position.up_to
                if self.late is not None:
                    start = min(start, self.late - 1)
            yield Part(first.starts_at, same[-1][0].ends_at, start, position)

    def floors(self, floors: Floors) -> dict[int, int]:
        """Return the hidden transactions whose end makes claims start lower, and where.

        There are none while claims continue as of an older snapshot.
        """
        if self.as_of is not None:
            return {}
        hidden = find_hidden(self.snapshot, self.next_xid)
        return {xid: floors.of(xid) for xid in hidden}

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
        as_of = self.as_of or snapshot
        if not is_cut:
            up_to = max([up_to, *(position.up_to for _, position in self.days)])
        days = tuple(
            (day, position.extend(up_to, as_of)) for day, position in self.days
        )
        is_late = any(position.late_up_to is not None for _, position in days)
        after = self._replace(days=days, as_of=as_of if is_late else None)
        if self.as_of is not None:
            return after
        return after._replace(snapshot=snapshot, next_xid=next_xid, late=None)

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
        return self._replace(number=self.number + 1, fence=_fence(rows)), rows


def _fence(rows: Sequence[Stored]) -> frozenset[Day]:
    late = frozenset(row.day for row in rows if row.position.late_up_to is not None)
    return late or frozenset(row.day for row in rows[-1:])
