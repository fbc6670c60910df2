"""How far back an open transaction may have begun to write: in time, and in seqs.

A transaction that stays open for hours commits rows whose `created_at` is hours old. A
claim that reads only the last hour would publish later messages of the same key first.
So the relay notes the last transaction id given out from time to time. A transaction
that is open now, and began to write after such a note, has a higher id. The same for
the last seq that was drawn: see `outbox/postgres/lane_cursor.py`.
"""

from datetime import datetime, timedelta
from typing import Final

from relay.lanes.lane import BEGINNING

# Claims look back further than necessary by at most this much.
_APART: Final = timedelta(minutes=1)
_MOST_NOTES: Final = 100


class XidHorizon:
    """Moments, each with the highest transaction id that had been given out by then."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, datetime]] = []
        self._drawn: list[tuple[int, int]] = []

    def note(self, given_out: int, now: datetime) -> None:
        """Note that at `now` the transaction id `given_out` was the highest."""
        if not self._noted or now - self._noted[-1][1] >= _APART:
            self._noted.append((given_out, now))

    def since(self, oldest_open: int) -> datetime:
        """Return a moment before which no transaction from `oldest_open` on wrote.

        `BEGINNING` if that transaction may be older than the first note.
        """
        passed = [moment for id, moment in self._noted if id < oldest_open]
        if not passed:
            return BEGINNING
        # Nobody asks further back again: xmin never decreases.
        del self._noted[: len(passed) - 1]
        return passed[-1]

    def note_drawn(self, transaction_id: int, seq: int) -> None:
        """Note that `seq` had been drawn when `transaction_id` was given out."""
        if self._drawn and seq < self._drawn[-1][1]:
            # The sequence went back.
            self._drawn.clear()
        # While one transaction stays open, only the notes around it matter.
        del self._drawn[_MOST_NOTES:-1]
        self._drawn.append((transaction_id, seq))

    def drawn_before(self, oldest_open: int) -> int:
        """Return a seq that no transaction from `oldest_open` on has drawn below.

        -1 if none is known.
        """
        passed = [seq for id, seq in self._drawn if id <= oldest_open]
        if not passed:
            return -1
        del self._drawn[: len(passed) - 1]
        return passed[-1]
