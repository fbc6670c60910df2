"""What this relay knows about one lane: its floor, what waits in it, and its state.

Claims start above the *floor*; `outbox/postgres/lane_cursor.py` explains how it rises.
They leave out every message that has a mark. So each message passes through one claim
and leaves it with a mark: published, dead-lettered or deferred. A deferred message is
in the log; see `relay/lanes/deferrals.py`.

The *watermark* is a floor that was verified and stored: every message of the lane up to
it has a mark. A relay that takes over the lane starts there. Every few seconds, a sweep
verifies the messages that the floor has passed since the last sweep, in all partitions,
and looks for the first message above the floor without a mark.
"""

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

from outbox.postgres.lane_cursor import LaneCursor, Snapshot
from relay.lanes.deferrals import Deferrals

BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)
SKEW: Final = timedelta(hours=1)


class Lane:
    """What this relay knows about one lane that it holds."""

    __slots__ = (
        "cursor",
        "deferrals",
        "idle",
        "in_flight",
        "is_new",
        "needs_refresh",
        "newest",
        "number",
        "oldest",
        "raised_at",
        "rewound",
        "unwritten",
        "verified",
        "verified_by",
        "watermark",
        "woken",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = LaneCursor()
        self.deferrals = Deferrals()
        self.oldest = BEGINNING
        self.newest = BEGINNING
        self.watermark = -1
        """The highest stored one that this relay knows; see `outbox.watermark`."""
        self.raised_at = BEGINNING
        """When the watermark was last raised."""
        self.verified = -1
        """Up to this seq, this relay has seen a mark for each message."""
        self.verified_by: object = None
        """The connection on which it saw these marks."""
        self.unwritten: dict[datetime, int] = {}
        """How many messages were verified above the watermark, by partition."""
        self.is_new = True
        """Its watermark has not been read yet."""
        self.needs_refresh = True
        """Its log and its first message without a mark must be read."""
        self.idle = False
        """The last claim found nothing, and nothing has woken it since."""
        self.in_flight = False
        self.woken = False
        """Something may have arrived since the current claim began."""
        self.rewound = False
        """An older row may have become claimable since the current claim began."""

    @property
    def floor(self) -> int:
        """The sequence number above which claims start."""
        return self.cursor.floor

    def rewind(self, seq: int, created_at: datetime) -> None:
        """Make a row claimable again."""
        self.cursor.rewind(seq)
        self.rewound = True
        self.oldest = min(self.oldest, created_at)
        self.wake()

    def restart(self) -> None:
        """Start over, because the sequence was set back."""
        self.cursor.restart()
        self.watermark = -1
        self.forget_verified()
        self.rewound = True

    def start_at(self, watermark: int) -> None:
        """Start at a seq up to which another relay has verified all marks."""
        self.watermark = watermark
        self.forget_verified()
        self.cursor.start_at(watermark)
        self.is_new = False

    def note_verified(self, up_to: int, messages: Mapping[datetime, int]) -> None:
        """Record that every message up to a seq has a mark, and how many there are.

        Args:
            messages: the number of messages, by the start of their partition.
        """
        self.verified = up_to
        for starts_at, count in messages.items():
            self.unwritten[starts_at] = self.unwritten.get(starts_at, 0) + count

    def forget_verified(self) -> None:
        """Forget what was verified above the watermark, to verify it again."""
        self.verified = self.watermark
        self.unwritten.clear()

    def watermark_written(self, now: datetime) -> None:
        """Record that the verified stretch has been stored.

        If there was nothing to store, the watermark stays: stretches form a chain.
        """
        self.watermark = self.verified
        self.unwritten.clear()
        self.raised_at = now

    def passed_by(self, seq: int) -> None:
        """Go back to a message without a mark, although the floor has passed it."""
        self.go_back_to(seq - 1)
        self.rewound = True
        self.needs_refresh = True

    def go_back_to(self, floor: int) -> None:
        """Undo a claim that failed halfway; the messages it read are claimed again."""
        self.cursor.fall_back(floor)
        self.wake()

    def picked(self) -> None:
        """Start a claim."""
        self.in_flight = True
        self.woken = False
        self.rewound = False

    def wake(self) -> None:
        """Make the lane available to claims again."""
        self.idle = False
        self.woken = True

    def found_empty(self) -> None:
        """Mark the lane as idle until it is woken, unless it was just woken."""
        deferrals = self.deferrals
        self.idle = not (self.woken or deferrals.has_work or deferrals.is_partly_read)

    def looked_up_to(self, seq: int, snapshot: Snapshot, drawn: int = -1) -> None:
        """Raise the floor as far as no open transaction may still commit a row.

        Args:
            seq: the seq up to which the look saw every row.
            drawn: see `LaneCursor.looked`.
        """
        # The look may not have seen a row that was rewound in the meantime.
        self.cursor.looked(seq, snapshot, -1 if self.rewound else drawn)

    def refresh(self, head: tuple[int, datetime] | None, since: datetime) -> None:
        """Update the lane from the database while it is picked, after its log.

        Args:
            head: seq and `created_at` of its first message without a mark.
            since: the earliest time at which an open transaction can have begun to
                write.
        """
        self.needs_refresh = self.deferrals.is_partly_read
        oldest = since if head is None else min(head[1], since)
        # A row that was rewound in the meantime may be older than the head.
        self.oldest = min(
            oldest - SKEW if oldest > BEGINNING else BEGINNING,
            self.oldest if self.rewound else since,
        )
        if head is not None:
            self.newest = head[1]
            if head[0] <= self.floor:
                self.rewind(*head)
