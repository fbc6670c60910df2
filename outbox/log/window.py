"""How far a consumer has read a lane whose deliveries end out of order.

Claims read on while handlers run, so there are two positions: how far the claims have
read, in memory, and the *stored* one, which covers only what has ended. It stays below
the oldest delivery *held*, that is, claimed and neither ended nor logged. A consumer
that is killed gets the deliveries again that ended above the stored position. To limit
their number, a delivery that is held for long gets an entry in the log, which says that
it is open, in the transaction that stores a position beyond it. A delivery that has an
entry already has ended here.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import TypeAlias

from pillarbox.outbox.log.position import Snapshot
from pillarbox.outbox.log.progress import Day, Progress, Stored

Place: TypeAlias = tuple[int, datetime]
"""The seq and created_at of a row. Seqs alone repeat if the sequence was set back."""


class Window:
    """The deliveries of one lane between its two positions. For one event loop.

    Attributes:
        read: how far claims have read.
        stored: the positions in the table.
    """

    __slots__ = ("_ended", "_held", "_last", "_logged", "read", "stored")

    def __init__(self, taken_over: Progress) -> None:
        self.read = self.stored = taken_over
        self._held: dict[Place, Day] = {}
        self._ended: dict[Place, Day] = {}
        self._logged: set[Place] = set()
        """Those of them that have entries."""
        self._last: tuple[int, Snapshot] | None = None

    def __contains__(self, place: Place) -> bool:
        """Whether a delivery was claimed that the stored position doesn't cover."""
        return place in self._held or place in self._ended

    def read_days(self, taken_over: Progress) -> None:
        """Read the days from now on that a repeated takeover has found."""
        late = [seq for seq in (self.read.late, taken_over.late) if seq is not None]
        self.read = _read_days(self.read, taken_over)._replace(
            late=min(late, default=None)
        )
        self.stored = _read_days(self.stored, taken_over)

    def claimed(
        self,
        places: Iterable[Place],
        up_to: int,
        snapshot: Snapshot,
        next_xid: int,
        *,
        is_cut: bool,
    ) -> None:
        """Hold the rows of a claim; see `Progress.claimed`."""
        as_of = self.read.as_of
        self.read = self.read.claimed(up_to, snapshot, next_xid, is_cut=is_cut)
        if not is_cut:
            up_to = self.read.days[0][1].up_to
        self._last = up_to, as_of or snapshot
        for place in places:
            self._held[place] = self.day_of(place)

    def ended(self, place: Place) -> None:
        """Record that a delivery was handled, or got an entry of another cause."""
        if place in self._held:
            self._ended[place] = self._held.pop(place)

    def logged(self, place: Place) -> None:
        """Record that a delivery has an entry, which no position covers yet."""
        if place in self._held:
            self.ended(place)
            self._logged.add(place)

    @property
    def passed_by(self) -> list[Place]:
        """The deliveries held, in order, behind which others have ended."""
        last = max(self._ended, default=None)
        if last is None:
            return []
        return sorted(place for place in self._held if place < last)

    def count_behind(self, place: Place) -> int:
        """Return how many deliveries have ended behind one that is held."""
        return sum(other > place for other in self._ended)

    def settle(
        self, logged: Collection[Place] = (), *, all_days: bool = False
    ) -> tuple[Progress, list[Stored], Counter[Day]] | None:
        """Return what to store now, and the stored progress once it has committed.

        Return None if the stored position can't advance, or not beyond `logged`: then
        these deliveries can't get their entries yet.

        Args:
            logged: the deliveries that get an entry in the same transaction.
            all_days: whether to store the position of every day, even if none of its
                deliveries has ended.

        Returns:
            The progress, the rows, and how many deliveries of each day they cover.
        """
        if self._last is None:
            return None
        up_to, (_, snapshot) = self._up_to(logged), self._last
        covered = Counter(day for (seq, _), day in self._ended.items() if seq <= up_to)
        for place in logged:
            if place[0] > up_to:
                return None
            covered[self._held[place]] += 1
        days = {*covered}
        if all_days:
            days.update(day for day, _ in self.stored.days)
        if not days:
            return None
        days |= self.stored.fence
        advanced = []
        for day, position in self.stored.days:
            if day not in days:
                advanced.append((day, position))
                continue
            late_up_to = position.late_up_to
            if late_up_to is not None and up_to < late_up_to:
                return None  # That would take a third part.
            advanced.append((day, position.extend(up_to, snapshot)))
        after, rows = self.stored._replace(days=tuple(advanced)).settle(days)
        return after, rows, covered

    def deferred(self, logged: Collection[Place] = ()) -> Counter[Day]:
        """Return how many of the deliveries that `settle` covers have entries."""
        up_to = self._up_to(logged)
        days = Counter(self._held[place] for place in logged)
        days.update(self._ended[place] for place in self._logged if place[0] <= up_to)
        return days

    def _up_to(self, logged: Collection[Place] = ()) -> int:
        """Return how far a position could be stored now."""
        assert self._last is not None
        held = (seq - 1 for seq, at in self._held if (seq, at) not in logged)
        return min(self._last[0], min(held, default=self._last[0]))

    def settled(self, stored: Progress, logged: Collection[Place] = ()) -> None:
        """Record that what `settle` returned has committed."""
        self.stored = stored
        for place in logged:
            del self._held[place]
        up_to = self._up_to()
        self._ended = {
            place: day for place, day in self._ended.items() if place[0] > up_to
        }
        self._logged = {place for place in self._logged if place[0] > up_to}

    def day_of(self, place: Place) -> Day:
        """Return the day to which a row belongs."""
        day = self.read.day_of(place[1])
        assert day is not None
        return day


def _read_days(progress: Progress, taken_over: Progress) -> Progress:
    known = dict(progress.days)
    return progress._replace(
        days=tuple((day, known.get(day, new)) for day, new in taken_over.days)
    )
