"""A lane of a relay: how far it is read, and its waiting messages.

How far it is read is described in `outbox/log/progress.py`. Each message passes through
one claim. If it isn't published by then, it gets an entry in the log; see
`outbox/log/lanes/keys.py`.
"""

from collections.abc import Iterable
from datetime import datetime

from typing_extensions import override

from outbox.log.lane import LogLane
from outbox.log.lanes.keys import LaneKeys, WaitingMessage
from outbox.log.progress import Progress


class Lane(LogLane):
    """A lane that this relay holds. Only its own methods change it.

    Attributes:
        keys: its blocked keys and waiting messages.
        needs_refresh: other days, and the log, must be read.
        idle: the last claim found nothing, and nothing has woken it since.
        in_flight: a batch is on its way.
        skipped: how many messages of other topics claims have passed since the lane's
            position was stored.
        woken: something may have arrived since the current claim began.
        leased_at: when it was read first, by the database's clock.
        read_at: when it was refreshed last, by the same clock.
    """

    __slots__ = (
        "idle",
        "in_flight",
        "keys",
        "leased_at",
        "needs_refresh",
        "read_at",
        "skipped",
        "woken",
    )

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.keys = LaneKeys()
        self.needs_refresh = True
        self.idle = False
        self.in_flight = False
        self.skipped = 0
        self.woken = False
        self.leased_at: datetime | None = None
        self.read_at: datetime | None = None

    def doubt(self) -> None:
        """Forget everything: another process, or a crash, may have changed it."""
        self.progress = None
        self.known_at = 0.0
        self.keys = LaneKeys()
        self.needs_refresh = True
        self.wake()

    def require_refresh(self) -> None:
        """Read other days, and the log, before the next claim."""
        self.needs_refresh = True

    def restart_log(self) -> None:
        """Read the log from its beginning."""
        self.keys.restart_log()
        self.needs_refresh = True

    def log_read(self, cut: int | None, assigned: int, now: datetime) -> None:
        """Record that a refresh has read the log; see `LaneKeys.portion_read`."""
        self.leased_at = self.leased_at or now
        self.read_at = now
        self.keys.portion_read(cut, assigned)
        self.needs_refresh = self.keys.is_partly_read

    # All lanes in one call, since each message wakes all of them.

    @staticmethod
    def picked(lanes: Iterable["Lane"]) -> None:
        """Start a claim of these lanes."""
        for lane in lanes:
            lane.in_flight, lane.woken = True, False

    @staticmethod
    def wake_all(lanes: Iterable["Lane"]) -> None:
        """Make lanes available to claims again."""
        for lane in lanes:
            lane.idle, lane.woken = False, True

    @staticmethod
    def found_empty(lanes: Iterable["Lane"]) -> None:
        """Mark lanes as idle until they are woken, unless they were just woken."""
        for lane in lanes:
            keys = lane.keys
            lane.idle = not (
                lane.woken or keys.draining or keys.due or keys.reading is not None
            )

    @staticmethod
    def put_back(lanes: Iterable["Lane"]) -> None:
        """End the claim of these lanes."""
        for lane in lanes:
            lane.in_flight = False

    def release(self, message: WaitingMessage) -> None:
        """Make a message claimable again: its last claim had no outcome."""
        self.keys.release(message)
        self.wake()

    def wake(self) -> None:
        """Make the lane available to claims again."""
        self.wake_all([self])

    def skip(self, messages: int) -> None:
        """Count messages of other topics."""
        self.skipped += messages

    @override
    def settled(self, after: Progress, at: float) -> None:
        super().settled(after, at)
        self.skipped = 0
