"""How far back in time an open transaction may have begun to write.

A writer that stays open for hours commits rows whose `created_at` is hours old. A
claim that looks at the last hour only would publish what follows them in their key
first. So from time to time it is noted which transaction id was the last one given
out; what is open now, and began to write after that, has a higher one.
"""

from datetime import datetime, timedelta
from typing import Final

from relay.lanes.lane import BEGINNING

# Long transactions make claims look that much further back than they need.
_APART: Final = timedelta(minutes=1)


class Horizon:
    """Pairs of a transaction id and a moment at which no higher one was given out."""

    def __init__(self) -> None:
        self._noted: list[tuple[int, datetime]] = []

    def note(self, given_out: int, now: datetime) -> None:
        """Note that at `now` the transaction id `given_out` was the highest."""
        if not self._noted or now - self._noted[-1][1] >= _APART:
            self._noted.append((given_out, now))

    def since(self, oldest_open: int) -> datetime:
        """Tell a moment before which no transaction from `oldest_open` on wrote.

        `BEGINNING` if it was open before anything was noted.
        """
        passed = [moment for id, moment in self._noted if id < oldest_open]
        if not passed:
            return BEGINNING
        # What is open now ends before what will be: nobody asks further back again.
        del self._noted[: len(passed) - 1]
        return passed[-1]
