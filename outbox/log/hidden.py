"""How far below its position a claim must look for rows that committed late.

Rows at or below a position that a claim hasn't read belong to transactions that are not
visible in its snapshot. All of these had their ids when the claim looked. While none of
them has ended, claims start at the position, however many are open. When one ends, the
next claim starts at its *floor*: a seq that had been drawn before the transaction got
its id, hence before it drew its own seqs.
"""

from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter
from typing import Final, NamedTuple, Self

from pillarbox.outbox.log.position import Snapshot

_MOST_NOTES: Final = 256
_NEVER: Final = 2**63 - 1
"""An id that no transaction has, and a seq beyond all rows."""


class Hidden(NamedTuple):
    """The transactions that may yet commit rows below what a claim saw.

    Those from xmax on are many if one has many savepoints, so they are not listed.
    """

    open: Mapping[int, int]
    """Those in progress in its snapshot, with their floors."""
    since: int = _NEVER
    """Its xmax: others have this id, or a higher one."""
    floor: int = _NEVER
    """The lowest of their floors."""

    def find_floor(self, snapshot: Snapshot) -> int | None:
        """Return where a claim with this snapshot must start, if any has ended.

        It may start lower than necessary: an id from xmax on that has ended need not
        have been assigned when the first claim looked.
        """
        floors = [floor for xid, floor in self.open.items() if snapshot.visible(xid)]
        if snapshot.xmax > self.since:
            floors.append(self.floor)
        return min(floors, default=None)

    def split(self, lowest: int, first: int) -> tuple["Hidden", "Hidden"]:
        """Return those with this floor or a higher one, and this id or a higher one.

        The others come second.
        """
        near = {
            xid: floor
            for xid, floor in self.open.items()
            if floor >= lowest and xid >= first
        }
        far = {xid: floor for xid, floor in self.open.items() if xid not in near}
        if self.floor >= lowest and self.since >= first:
            return self._replace(open=near), Hidden(far)
        return Hidden(near), self._replace(open=far)


class Floors(NamedTuple):
    """Which seqs had been drawn by the time that transactions got their ids."""

    notes: tuple[tuple[int, int], ...] = ()
    """Pairs of a transaction id and a seq, both ascending: when the id was not assigned
    yet, the seq had been drawn."""

    def note(self, next_xid: int, seq: int) -> Self:
        """Record a claim: the next id, read after its snapshot, and a seq that it saw.

        The sequence is never set back, and caches no numbers.
        """
        notes = self.notes
        if notes and seq <= notes[-1][1]:
            return self
        if len(notes) >= _MOST_NOTES:
            # A floor may be lower than necessary. Recent ones stay precise.
            notes = (*notes[: _MOST_NOTES // 2 : 2], *notes[_MOST_NOTES // 2 :])
        return self._replace(notes=(*notes, (next_xid, seq)))

    def of(self, xid: int) -> int:
        """Return a seq below all those of a transaction; -1 if none is known."""
        index = bisect_right(self.notes, xid, key=itemgetter(0))
        return self.notes[index - 1][1] if index else -1

    def find_hidden(self, snapshot: Snapshot) -> Hidden:
        """Return what may yet commit rows below what a claim with this snapshot saw."""
        since = snapshot.xmax
        floors = {xid: self.of(xid) for xid in snapshot.in_progress}
        return Hidden(floors, since, self.of(since))

    def forget(self, oldest: int) -> Self:
        """Forget what only concerns transactions with lower ids than this one."""
        passed = sum(next_xid <= oldest for next_xid, _ in self.notes)
        return self._replace(notes=self.notes[max(passed - 1, 0) :])
