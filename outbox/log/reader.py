"""A reader of the outbox: its takeovers and claims."""

from pillarbox.outbox.log.claims import Claims
from pillarbox.outbox.log.takeover import Takeover


class LogReader:
    """A reader of the outbox. For one event loop.

    Args:
        name: the name with which its positions are stored.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.claims = Claims()
        self.takeover = Takeover(name, self.claims)
        self._opened_at = 0.0

    def opened(self, at: float) -> None:
        """Start over in a session that was opened at this time; see `Link.opened_at`.

        A server that crashed, or a standby that was promoted, may have lost the end of
        its log, and uses the ids of its transactions and the numbers again.
        """
        if at > self._opened_at:
            self._opened_at = at
            self.claims.start_over()
            self.takeover.start_over()
