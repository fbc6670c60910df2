"""How far a consumer has read a lane whose deliveries end out of order.

Claims read on while handlers run, so there are two positions: how far the claims have
read, in memory, and the *stored* one, which covers only what has ended. It stays below
the oldest delivery *held*, that is, claimed and neither ended nor logged. A consumer
that is killed gets the deliveries again that ended above the stored position. To limit
their number, a delivery that is held for long gets an entry in the log, which says that
it is open, in the transaction that stores a position beyond it.
"""

from collections.abc import Iterable
from typing import Final

from outbox.log.position import Snapshot
from outbox.log.progress import Day, Progress, Stored

MOST_AGAIN: Final = 256
"""How many deliveries of a lane that have ended a consumer gets again after a kill."""


class Window:
    """The deliveries of one lane between its two positions. For one event loop.

    Attributes:
        read: how far claims have read.
        stored: the positions in the table.
    """

    __slots__ = ("_ended", "_held", "_last", "read", "stored")

    def __init__(self, taken_over: Progress) -> None:
        self.read = self.stored = taken_over
        self._held: dict[int, Day] = {}
        self._ended: dict[int, Day] = {}
        self._last: tuple[int, Snapshot] | None = None

    def claimed(
        self,
        rows: Iterable[tuple[int, Day]],
        up_to: int,
        snapshot: Snapshot,
        next_xid: int,
        *,
        is_cut: bool,
    ) -> None:
        """Hold the rows of a claim, given with their seqs; see `Progress.claimed`."""
        snapshot = self.read.as_of or snapshot
        if not is_cut:
            up_to = max([up_to, *(position.up_to for _, position in self.read.days)])
        self.read = self.read.claimed(up_to, snapshot, next_xid, is_cut=is_cut)
        self._last = up_to, snapshot
        self._held.update(rows)

    def ended(self, seq: int) -> None:
        """Record that a delivery was handled, or got an entry of another cause."""
        self._ended[seq] = self._held.pop(seq)

    @property
    def blocking(self) -> int | None:
        """The oldest delivery held, if so many have ended behind it that it must go."""
        oldest = min(self._held, default=None)
        if oldest is None or sum(seq > oldest for seq in self._ended) < MOST_AGAIN:
            return None
        return oldest

    def settle(self, logged: int | None = None) -> tuple[Progress, list[Stored]] | None:
        """Return what to store now, and the stored progress once it has committed.

        Return None if the stored position can't advance, or not beyond `logged`: then
        that delivery can't get its entry yet.

        Args:
            logged: the seq of a delivery that gets an entry in the same transaction.
        """
        if self._last is None:
            return None
        up_to, snapshot = self._last
        held = min((seq for seq in self._held if seq != logged), default=None)
        if held is not None:
            up_to = min(up_to, held - 1)
        days = {day for seq, day in self._ended.items() if seq <= up_to}
        if logged is not None:
            if logged > up_to:
                return None
            days.add(self._held[logged])
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
        return self.stored._replace(days=tuple(advanced)).settle(days)

    def settled(self, stored: Progress, logged: int | None = None) -> None:
        """Record that what `settle` returned has committed."""
        self.stored = stored
        if logged is not None:
            del self._held[logged]
        assert self._last is not None
        up_to = min([self._last[0], *(seq - 1 for seq in self._held)])
        self._ended = {seq: day for seq, day in self._ended.items() if seq > up_to}
