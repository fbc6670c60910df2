"""What this relay knows about one lane: how far it is read, and what waits in it.

How far it is read is described in `outbox/log/progress.py`. Each message passes through
one claim. If it isn't published by then, it gets an entry in the log of what waits; see
`relay/lanes/deferrals.py`.
"""

from outbox.log.reader import LogLane
from relay.lanes.deferrals import Deferrals


class Lane(LogLane):
    """What this relay knows about one lane that it holds.

    Attributes:
        needs_refresh: other days, and the log of what waits, must be read.
        idle: the last claim found nothing, and nothing has woken it since.
        in_flight: a batch is on its way.
        skipped: how many messages of other topics claims have passed since the lane's
            position was stored.
        woken: something may have arrived since the current claim began.
    """

    __slots__ = (
        "deferrals",
        "idle",
        "in_flight",
        "needs_refresh",
        "skipped",
        "woken",
    )

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.deferrals = Deferrals()
        self.needs_refresh = True
        self.idle = False
        self.in_flight = False
        self.skipped = 0
        self.woken = False

    def doubt(self) -> None:
        """Forget everything: another process, or a crash, may have changed it."""
        self.progress = None
        self.known_at = 0.0
        self.deferrals = Deferrals()
        self.needs_refresh = True
        self.wake()

    def picked(self) -> None:
        """Start a claim."""
        self.in_flight = True
        self.woken = False

    def wake(self) -> None:
        """Make the lane available to claims again."""
        self.idle = False
        self.woken = True

    def found_empty(self) -> None:
        """Mark the lane as idle until it is woken, unless it was just woken."""
        deferrals = self.deferrals
        self.idle = not (self.woken or deferrals.has_work or deferrals.is_partly_read)
