"""What this relay knows of one lane: its floor, its blocked keys, and its state.

Claims start above the *floor*; `outbox/postgres/lane_cursor.py` says how it rises.
Whatever makes a row claimable again rewinds it. Every few seconds a sweep looks for
the first ready row of each lane without a floor, which finds what was changed by hand.

A lane is *congested* while it has more blocked keys than a claim can carry. The keys
then stay in the database: a claim examines a bounded number of ready rows and leaves
out every row that has a refused message before it. The floor of a congested lane rises
past blocked rows, and is not rewound when a key becomes free, or claims would walk over
the rows of all other keys again and again. Instead such keys *catch up*: a second
position follows the floor and finds their rows alone, while claims above the floor
leave them out. Once it has arrived, everything goes on together.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from outbox.postgres.lane_cursor import LaneCursor, Snapshot

BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)
SKEW: Final = timedelta(hours=1)


class CatchUp:
    """Keys that became free in a congested lane, and how far their rows were read.

    Attributes:
        keys: keys whose refused message is due again.
        readied: seqs of messages that are due and were never refused.
        position: none of their rows is left at or below it.
        oldest: none of their rows is older.
        arrived: the last look reached the floor.
        moves: how often it was set back. What a look found is void if that happened
            meanwhile.
    """

    __slots__ = ("arrived", "keys", "moves", "oldest", "position", "readied")

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.readied: set[int] = set()
        self.position = 2**63 - 1
        self.oldest = datetime.max.replace(tzinfo=UTC)
        self.arrived = False
        self.moves = 0

    def back_to(self, seq: int, created_at: datetime) -> None:
        """Look for this row and whatever follows it."""
        self.position = min(self.position, seq - 1)
        self.oldest = min(self.oldest, created_at)
        self.arrived = False
        self.moves += 1

    def has(self, seq: int, key: str | None) -> bool:
        """Return whether the catch-up finds this row, not a claim above the floor."""
        return key in self.keys or seq in self.readied


class Lane:
    """What this relay knows of one lane that it holds."""

    __slots__ = (
        "blocked",
        "catch_up",
        "congested",
        "cursor",
        "idle",
        "in_flight",
        "needs_refresh",
        "newest",
        "number",
        "oldest",
        "refused_since",
        "rewound",
        "surveyed",
        "woken",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = LaneCursor()
        self.oldest = BEGINNING
        self.newest = BEGINNING
        self.blocked: set[str] = set()
        """Empty while it is congested."""
        self.congested = False
        self.catch_up: CatchUp | None = None
        self.refused_since = BEGINNING
        """No refused message of a congested lane is older."""
        self.surveyed = -1
        """Up to which seq the last survey of a congested lane looked for strays."""
        self.needs_refresh = True
        """Its blocked keys and its head must be read from the database."""
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

    def block(self, key: str, created_at: datetime, *, most: int) -> None:
        """Hold back a key: its message, added at that time, was refused."""
        if not self.congested:
            self.blocked.add(key)
            if len(self.blocked) <= most:
                return
            self._congest()
        self.refused_since = min(self.refused_since, created_at)

    def free(
        self, seq: int, key: str | None, created_at: datetime, *, refused: bool
    ) -> None:
        """Make a due message claimable; if it had been refused, free its key."""
        if not self.congested:
            if refused and key is not None:
                self.blocked.discard(key)
                # Claims left its key out, so the floor may have risen past rows that
                # drew a lower seq than this one and were committed meanwhile.
                self.needs_refresh = True
            self.rewind(seq, created_at)
            return
        if self.catch_up is None:
            self.catch_up = CatchUp()
        if refused and key is not None:
            self.catch_up.keys.add(key)
        else:
            self.catch_up.readied.add(seq)
        self.catch_up.back_to(seq, created_at)
        self.wake()

    def leave(self, seq: int, key: str | None, created_at: datetime) -> None:
        """Make a message claimable again that was claimed but not published."""
        if self.catch_up is not None and self.catch_up.has(seq, key):
            self.catch_up.back_to(seq, created_at)
            self.wake()
        else:
            self.rewind(seq, created_at)

    def end_catch_up(self) -> None:
        """Let the floor find whatever the catch-up has not."""
        if self.catch_up is not None:
            self.cursor.fall_back(self.catch_up.position)
            self.oldest = min(self.oldest, self.catch_up.oldest)
            self.catch_up = None

    def place(self) -> int:
        """Return the lowest seq that a claim may move, for `go_back_to`."""
        if self.catch_up is None:
            return self.floor
        return min(self.floor, self.catch_up.position)

    def go_back_to(self, place: int) -> None:
        """Undo a claim that failed halfway: what it has read is claimed again."""
        self.end_catch_up()
        self.cursor.fall_back(place)
        self.wake()

    def _congest(self) -> None:
        self.congested = True
        self.blocked = set()
        self.refused_since = BEGINNING
        self.surveyed = -1

    def picked(self) -> None:
        """Start a claim."""
        self.in_flight = True
        self.woken = False
        self.rewound = False

    def wake(self) -> None:
        """Have the lane claimed from again."""
        self.idle = False
        self.woken = True

    def found_empty(self) -> None:
        """Leave the lane alone until it is woken, unless that has just happened."""
        self.idle = not self.woken

    def looked_up_to(self, seq: int, snapshot: Snapshot) -> None:
        """Raise the floor as far as no open transaction may still commit a row."""
        self.cursor.looked(seq, snapshot)

    def refresh(
        self, blocked: set[str], head: tuple[int, datetime] | None, since: datetime
    ) -> None:
        """Update the lane from the database while it is picked.

        Args:
            blocked: its blocked keys.
            head: seq and `created_at` of its first ready message.
            since: when the first of the open transactions may have begun to write.
        """
        self.needs_refresh = False
        self.end_catch_up()
        self.congested = False
        self.blocked = blocked
        oldest = since if head is None else min(head[1], since)
        # A row that was rewound meanwhile may be older than the head.
        self.oldest = min(
            oldest - SKEW if oldest > BEGINNING else BEGINNING,
            self.oldest if self.rewound else since,
        )
        if head is not None:
            self.newest = head[1]
            if head[0] <= self.floor:
                self.rewind(*head)

    def refresh_congested(
        self,
        first: datetime | None,
        stray: tuple[int, datetime] | None,
        since: datetime,
        refused_since: datetime,
        given_out: int,
        snapshot: Snapshot,
    ) -> None:
        """Update the lane from the database: it has many blocked keys.

        Args:
            first: `created_at` of its first ready message, blocked or not.
            stray: seq and `created_at` of a row that was passed by and isn't blocked.
            since: when the first of the open transactions may have begun to write.
            refused_since: no refused message is older.
            given_out: the last seq that had been drawn before the survey.
            snapshot: that of the survey.
        """
        self.needs_refresh = False
        if not self.congested:
            self._congest()
        oldest = since if first is None else min(first, since)
        oldest = oldest - SKEW if oldest > BEGINNING else BEGINNING
        self.oldest = min(oldest, self.oldest) if self.rewound else oldest
        if first is not None:
            self.newest = first
        # The relay that had the lane before may still refuse what is ready now.
        self.refused_since = min(refused_since, self.oldest)
        if stray is not None:
            self.rewind(*stray)
        else:
            self.cursor.remember(given_out, snapshot)
