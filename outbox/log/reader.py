"""A reader of a log: its takeovers, claims and settlements."""

from typing import Final

from outbox.log.claims import Claims
from outbox.log.settlements import Settlements
from outbox.log.takeover import Takeover

CLAIM_SETTINGS: Final = {
    # If a server crash loses a settlement, its messages are published or delivered
    # again, which at-least-once delivery allows, so settling doesn't wait for the disk.
    "synchronous_commit": "off",
    # Otherwise each connection makes a generic plan for all partitions, which costs
    # more than a custom plan for the days of the batch: with 90 partitions, 21 ms to
    # settle and 15 ms to claim, compared with 1.6 ms each with 8.
    "plan_cache_mode": "force_custom_plan",
    # Otherwise a claim from lanes of about a thousand rows reads each lane to its end
    # and sorts it, although the index returns the rows in order: 5 ms for 500 rows
    # instead of 2. Without statistics the same happens to longer lanes.
    "enable_sort": "off",
    # Otherwise the estimates, which assume full hash tables, make the server
    # JIT-compile each claim, which takes longer than the claim itself: with 90
    # partitions, the one that checks the database at startup took 2 s.
    "jit": "off",
}
"""Those of a session that claims or settles."""


class LogReader:
    """A reader of the outbox. For one event loop.

    Args:
        name: the name with which its positions are stored.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.claims = Claims()
        self.takeover = Takeover(name, self.claims)
        self.settlements = Settlements(name)
        self._opened_at = 0.0

    def opened(self, at: float) -> None:
        """Begin anew in a session that was opened at this time; see `Link.opened_at`.

        A server that crashed, or a standby that was promoted, may have lost the end of
        its log, and uses the ids of its transactions and the numbers again.
        """
        if at > self._opened_at:
            self._opened_at = at
            self.claims.start_over()
            self.takeover.start_over()
