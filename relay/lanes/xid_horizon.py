"""How far back an open transaction may have begun to write, in time and in seqs.

A transaction that stays open for hours commits rows whose `created_at` is hours old. A
claim that reads only the last hour would publish later messages of the same key first.
So the relay periodically records the last transaction id that was assigned. An open
transaction that began to write after such a record has a higher id. The same applies to
the last seq that was drawn; see `outbox/postgres/lane_cursor.py`.
"""

from datetime import datetime, timedelta
from typing import Final

from relay.lanes.lane import BEGINNING

# Claims look back at most this much further than necessary.
_APART: Final = timedelta(minutes=1)
_MOST_NOTES: Final = 100


class XidHorizon:
    """Points in time, each with the highest transaction id assigned by then."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, datetime]] = []
        self._drawn: list[tuple[int, int]] = []

    def note(self, given_out: int, now: datetime) -> None:
        """Record that at `now` the highest transaction id assigned was `given_out`."""
        if not self._noted or now - self._noted[-1][1] >= _APART:
            self._noted.append((given_out, now))

    def since(self, oldest_open: int) -> datetime:
        """Return a time before which no transaction from `oldest_open` on wrote.

        Return `BEGINNING` if that transaction may be older than the first record.
        """
        passed = [moment for id, moment in self._noted if id < oldest_open]
        if not passed:
            return BEGINNING
        # No later call looks further back: xmin never decreases.
        del self._noted[: len(passed) - 1]
        return passed[-1]

    def note_drawn(self, transaction_id: int, seq: int) -> None:
        """Record that `seq` had been drawn when `transaction_id` was assigned."""
        if self._drawn and seq < self._drawn[-1][1]:
            # The sequence was set back.
            self._drawn.clear()
        # While one transaction stays open, only the records around it matter.
        del self._drawn[_MOST_NOTES:-1]
        self._drawn.append((transaction_id, seq))

    def drawn_before(self, oldest_open: int) -> int:
        """Return a seq below all those drawn by transactions from `oldest_open` on.

        Return -1 if none is known.
        """
        passed = [seq for id, seq in self._drawn if id <= oldest_open]
        if not passed:
            return -1
        del self._drawn[: len(passed) - 1]
        return passed[-1]
