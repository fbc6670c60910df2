"""How far below its position a claim must look for rows that committed late.

Rows at or below a position that a claim hasn't read belong to transactions that are not
visible in its snapshot. All of these had their ids when the claim looked. While none of
them has ended, claims start at the position, however many are open. When one ends, the
next claim starts at its *floor*: a seq that had been drawn before the transaction got
its id, hence before it drew its own seqs.
"""

from typing import Final, NamedTuple, Self

from outbox.log.position import Snapshot

_MOST_NOTES: Final = 256


def find_hidden(snapshot: Snapshot, next_xid: int) -> set[int]:
    """Return the transactions that may yet commit rows below what a statement saw.

    Args:
        snapshot: the snapshot of the statement.
        next_xid: the next id, read after the snapshot. It can be higher than xmax:
            transactions above xmax can be open.
    """
    return {*snapshot.in_progress, *range(snapshot.xmax, next_xid)}


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
        return max((seq for next_xid, seq in self.notes if next_xid <= xid), default=-1)

    def forget(self, oldest: int) -> Self:
        """Forget what only concerns transactions with lower ids than this one."""
        passed = sum(next_xid <= oldest for next_xid, _ in self.notes)
        return self._replace(notes=self.notes[max(passed - 1, 0) :])
