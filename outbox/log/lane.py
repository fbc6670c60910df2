"""A lane, as a reader of a log remembers it."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final, Generic, NamedTuple, TypeVar

from outbox.log.position import NOTHING
from outbox.log.progress import Day, Progress, Stored
from outbox.log.view import ReadView

BEGINNING: Final = datetime(1, 1, 3, tzinfo=UTC)


class Extent(NamedTuple):
    """How far a claim has read a lane; see `Progress.claimed`."""

    up_to: int
    view: ReadView
    is_cut: bool


class LogLane:
    """A lane of a reader. Only its own methods change it.

    Attributes:
        progress: how far the lane was read; None: it must be taken over.
        known_at: when the server was known to have what `progress` says, as
            `time.monotonic()`; see `Link.opened_at`.
        taken_at: the next transaction id when its claims began to read these days only.
        searched: the snapshot in which all other days were last searched.
        searches: how often they were.
        expires_at: when the lane must be taken over again.
    """

    __slots__ = (
        "expires_at",
        "known_at",
        "number",
        "progress",
        "searched",
        "searches",
        "taken_at",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.progress: Progress | None = None
        self.known_at = 0.0
        self.taken_at = 0
        self.searched = NOTHING
        self.searches = 0
        self.expires_at = BEGINNING

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

    def settled(self, after: Progress, at: float) -> None:
        """Continue after a settlement that was begun at this time, and committed."""
        self.progress = after
        self.known_at = at

    def reads(self, first: datetime, last: datetime | None = None) -> bool:
        """Whether these moments are in one of the days that claims read."""
        progress = self.progress
        return progress is not None and progress.day_of(first, last) is not None


AnyLane = TypeVar("AnyLane", bound=LogLane)


class Advance(NamedTuple, Generic[AnyLane]):
    """The positions that a settlement stores for a lane.

    Attributes:
        after: the lane's progress once it has committed.
        messages: how many messages the settlement covers, by day.
        deferred: how many of them were not published, by day.
    """

    lane: AnyLane
    after: Progress
    rows: Sequence[Stored]
    messages: Mapping[Day, int]
    deferred: Mapping[Day, int]
