"""What this relay knows of one lane: its floor, its blocked keys, and its state.

Claims start above the *floor*; `outbox/postgres/lane_cursor.py` says how it rises.
Whatever makes a row claimable again rewinds it. Every few seconds a sweep looks for
the first ready row of each lane without a floor, which finds what was changed by hand.

A lane is *crowded* while it has more blocked keys than a claim can carry. The keys then
stay in the database: a claim examines a bounded number of ready rows and leaves out
every row that has a refused message before it. The floor of a crowded lane rises past
blocked rows, and is not rewound when a key becomes free, or claims would walk over the
rows of all other keys again and again. Instead such keys *catch up*: a second position
runs after the floor and finds their rows alone, while claims above the floor leave them
out. Once it has arrived, everything goes on together.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from outbox.postgres.lane_cursor import LaneCursor, Snapshot

BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)
SKEW: Final = timedelta(hours=1)


class CatchUp:
    """Keys that became free in a crowded lane, and how far their rows were found.

    Attributes:
        keys: those whose refused message is due again.
        readied: seqs of messages that were due and never refused.
        position: at or below it nothing of these is left.
        oldest: none of their rows is older.
        arrived: the last look came to where the floor was then.
        moves: how often it was set back: a look that was under way says nothing then.
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
        """Look for this row and what follows it."""
        self.position = min(self.position, seq - 1)
        self.oldest = min(self.oldest, created_at)
        self.arrived = False
        self.moves += 1

    def has(self, seq: int, key: str | None) -> bool:
        """Tell whether this row is found by the catch-up, not by the floor."""
        return key in self.keys or seq in self.readied


class Lane:
    """What this relay knows of one lane that it holds."""

    __slots__ = (
        "blocked",
        "catch_up",
        "crowded",
        "cursor",
        "dry",
        "in_flight",
        "newest",
        "number",
        "oldest",
        "refused_since",
        "rewound",
        "stirred",
        "strange",
        "surveyed",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.cursor = LaneCursor()
        self.oldest = BEGINNING
        self.newest = BEGINNING
        self.blocked: set[str] = set()
        """Empty while it is crowded."""
        self.crowded = False
        self.catch_up: CatchUp | None = None
        self.refused_since = BEGINNING
        """In a crowded lane: no refused message is older."""
        self.surveyed = -1
        """Up to which seq the last survey of a crowded lane looked for strays."""
        self.strange = True
        """Its blocked keys and its head are to be read from the database."""
        self.dry = False
        """The last look found nothing."""
        self.in_flight = False
        self.stirred = False
        """Something may have come since the claim that is under way."""
        self.rewound = False
        """A row became claimable again since then, which may lie further back."""

    @property
    def floor(self) -> int:
        """The sequence number above which claims start."""
        return self.cursor.floor

    def rewind(self, seq: int, created_at: datetime) -> None:
        """Make a row claimable again."""
        self.cursor.rewind(seq)
        self.rewound = True
        self.oldest = min(self.oldest, created_at)
        self.stir()

    def block(self, key: str, created_at: datetime, *, most: int) -> None:
        """Hold back a key whose message of that time was refused."""
        if not self.crowded:
            self.blocked.add(key)
            if len(self.blocked) <= most:
                return
            self._crowd()
        self.refused_since = min(self.refused_since, created_at)

    def free(
        self, seq: int, key: str | None, created_at: datetime, *, refused: bool
    ) -> None:
        """Make a message claimable that is due; if it was refused, its key is free."""
        if not self.crowded:
            if refused and key is not None:
                self.blocked.discard(key)
                # Rows of this key that were committed meanwhile, but drew their seq
                # before this one, may lie below it, and the floor has passed them.
                self.strange = True
            self.rewind(seq, created_at)
            return
        if self.catch_up is None:
            self.catch_up = CatchUp()
        if refused and key is not None:
            self.catch_up.keys.add(key)
        else:
            self.catch_up.readied.add(seq)
        self.catch_up.back_to(seq, created_at)
        self.stir()

    def leave(self, seq: int, key: str | None, created_at: datetime) -> None:
        """Give back a message that was claimed and not published."""
        if self.catch_up is not None and self.catch_up.has(seq, key):
            self.catch_up.back_to(seq, created_at)
            self.stir()
        else:
            self.rewind(seq, created_at)

    def end_catch_up(self) -> None:
        """Go on together: what is between is found by the floor."""
        if self.catch_up is not None:
            self.cursor.fall_back(self.catch_up.position)
            self.oldest = min(self.oldest, self.catch_up.oldest)
            self.catch_up = None

    def place(self) -> int:
        """Give a seq above which a claim that is under way may move things."""
        if self.catch_up is None:
            return self.floor
        return min(self.floor, self.catch_up.position)

    def go_back_to(self, place: int) -> None:
        """Undo a claim that failed under way: what it read is claimed again."""
        self.end_catch_up()
        self.cursor.fall_back(place)
        self.stir()

    def _crowd(self) -> None:
        self.crowded = True
        self.blocked = set()
        self.refused_since = BEGINNING
        self.surveyed = -1

    def picked(self) -> None:
        """Begin a flight; what happens from now on concerns its claim."""
        self.in_flight = True
        self.stirred = False
        self.rewound = False

    def stir(self) -> None:
        """Look at it again."""
        self.dry = False
        self.stirred = True

    def found_empty(self) -> None:
        """Leave it alone until it is stirred, unless it just was."""
        self.dry = not self.stirred

    def looked_up_to(self, seq: int, snapshot: Snapshot) -> None:
        """Raise the floor as far as no open transaction may still bring a row."""
        self.cursor.looked(seq, snapshot)

    def acquainted(
        self, blocked: set[str], head: tuple[int, datetime] | None, since: datetime
    ) -> None:
        """Learn what the database says of this lane, while it is picked.

        Args:
            blocked: its blocked keys.
            head: seq and `created_at` of its first ready message.
            since: when the first of the open transactions may have begun to write.
        """
        self.strange = False
        self.end_catch_up()
        self.crowded = False
        self.blocked = blocked
        oldest = since if head is None else min(head[1], since)
        # A row that was rewound under way may be older than the head was.
        self.oldest = min(
            oldest - SKEW if oldest > BEGINNING else BEGINNING,
            self.oldest if self.rewound else since,
        )
        if head is not None:
            self.newest = head[1]
            if head[0] <= self.floor:
                self.rewind(*head)

    def surveyed_crowd(
        self,
        first: datetime | None,
        stray: tuple[int, datetime] | None,
        since: datetime,
        refused_since: datetime,
        given_out: int,
        snapshot: Snapshot,
    ) -> None:
        """Learn what the database says of this lane, which has many blocked keys.

        Args:
            first: `created_at` of its first ready message, blocked or not.
            stray: seq and `created_at` of one that was passed by and isn't blocked.
            since: when the first of the open transactions may have begun to write.
            refused_since: before it there is no refused message.
            given_out: the last seq that had been drawn before the survey.
            snapshot: that of the survey.
        """
        self.strange = False
        if not self.crowded:
            self._crowd()
        oldest = since if first is None else min(first, since)
        oldest = oldest - SKEW if oldest > BEGINNING else BEGINNING
        self.oldest = min(oldest, self.oldest) if self.rewound else oldest
        if first is not None:
            self.newest = first
        # Whoever had the lane before may still refuse what is ready now.
        self.refused_since = min(refused_since, self.oldest)
        if stray is not None:
            self.rewind(*stray)
        else:
            self.cursor.remember(given_out, snapshot)
