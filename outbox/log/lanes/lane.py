"""A lane: how far it is read, and its waiting messages.

How far it is read is described in `outbox/log/progress.py`. Each message passes through
one claim. If it isn't published by then, it gets an entry in the log; see
`outbox/log/lanes/keys.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pillarbox.outbox.log.lanes.keys import LaneKeys, WaitingMessage
from pillarbox.outbox.log.position import NOTHING
from pillarbox.outbox.log.progress import Day, Progress, Stored
from pillarbox.outbox.log.view import ReadView

BEGINNING: Final = datetime(1, 1, 3, tzinfo=UTC)


class Extent(NamedTuple):
    """How far a claim has read a lane; see `Progress.claimed`."""

    up_to: int
    view: ReadView
    is_cut: bool


class Lane:
    """A lane that this process holds. Only its own methods change it.

    Attributes:
        progress: how far the lane was read; None: it must be taken over.
        known_at: when the server was known to have what `progress` says, as
            `time.monotonic()`; see `Link.opened_at`.
        taken_at: the next transaction id when its claims began to read these days only.
        searched: the snapshot in which all other days were last searched.
        searches: how often they were.
        expires_at: when the lane must be taken over again.
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
        "expires_at",
        "idle",
        "in_flight",
        "keys",
        "known_at",
        "leased_at",
        "needs_refresh",
        "number",
        "progress",
        "read_at",
        "searched",
        "searches",
        "skipped",
        "taken_at",
        "woken",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.progress: Progress | None = None
        self.known_at = 0.0
        self.taken_at = 0
        self.searched = NOTHING
        self.searches = 0
        self.expires_at = BEGINNING
        self.keys = LaneKeys()
        self.needs_refresh = True
        self.idle = False
        self.in_flight = False
        self.skipped = 0
        self.woken = False
        self.leased_at: datetime | None = None
        self.read_at: datetime | None = None

    def take_over(
        self, progress: Progress, view: ReadView, *, at: float, expires_at: datetime
    ) -> None:
        """Continue with the result of a takeover that was begun at this time."""
        before = self.progress
        if before is None or before.days[0][0] != progress.days[0][0]:
            self.taken_at = view.next_xid
        self.continue_with(progress)
        self.known_at = at
        self.expires_at = expires_at

    def continue_with(self, progress: Progress) -> None:
        """Read on from here."""
        self.progress = progress

    def require_takeover(self) -> None:
        """Take the lane over before the next claim."""
        self.progress = None

    def move_fence(self, day: Day) -> tuple[Progress, Sequence[Stored]] | None:
        """Return what to store if its last settlement is of another day."""
        assert self.progress is not None
        return self.progress.move_fence(day)

    def expire(self) -> None:
        """Take the lane over with the next refresh."""
        self.expires_at = BEGINNING

    def searched_in(self, view: ReadView) -> None:
        """Record that all days were searched, or are read by claims."""
        self.searched = view.snapshot
        self.searches += 1

    def found_late(self, seq: int | None, view: ReadView) -> None:
        """Record the lowest row that committed late; None: there is none."""
        assert self.progress is not None
        self.progress = self.progress.looked(seq, view.snapshot, view.next_xid)

    def advance(self, extent: Extent) -> None:
        """Move on, in memory, past rows that need no settlement."""
        progress, view = self.progress, extent.view
        if progress is not None and (extent.up_to >= 0 or not extent.is_cut):
            self.progress = progress.claimed(
                extent.up_to, view.snapshot, view.next_xid, is_cut=extent.is_cut
            )

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

    def settled(self, after: Progress, at: float) -> None:
        """Continue after a settlement that was begun at this time, and committed."""
        self.progress = after
        self.known_at = at
        self.skipped = 0

    def reads(self, first: datetime, last: datetime | None = None) -> bool:
        """Whether these moments are in one of the days that claims read."""
        progress = self.progress
        return progress is not None and progress.day_of(first, last) is not None


class Advance(NamedTuple):
    """The positions that a settlement stores for a lane.

    Attributes:
        after: the lane's progress once it has committed.
        messages: how many messages the settlement covers, by day.
        deferred: how many of them were not published, by day.
    """

    lane: Lane
    after: Progress
    rows: Sequence[Stored]
    messages: Mapping[Day, int]
    deferred: Mapping[Day, int]
