"""What this relay knows of one lane: above all, its floor.

The *floor* of a lane is the seq at or below which nothing is left to claim: dead
index entries behind it are never walked again, not even while another session's
snapshot keeps them from being cleaned up. Whatever makes a row claimable again
rewinds it. Every few seconds the head of each lane is looked for without floor, which
finds what was changed by hand.

The floor lags behind the claims. Writers draw their seq before they commit, so a
claim may find 12 and not 11, whose transaction is still open; with the floor at 12,
what follows 11 in its key would overtake it. So a floor rises to 12 only by a later
look, which began after all transactions of that time had ended, and so found 11.
(The default of seq gives a transaction its id before it draws a seq.)
"""

from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self

BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)
SKEW: Final = timedelta(hours=1)


class Snapshot(NamedTuple):
    """Which transactions a statement could not see, by their ids."""

    oldest: int
    """All below had ended."""
    end: int
    """One above the last that had ended. Some from here on may have begun to write:
    hence only the end of a *later* snapshot is above all that were open."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Read PostgreSQL's `pg_snapshot`: `xmin:xmax:list`."""
        oldest, end, _ = text.split(":")
        return cls(int(oldest), int(end))


class Lane:
    """What this relay knows of one lane that it holds."""

    __slots__ = (
        "blocked",
        "dry",
        "floor",
        "in_flight",
        "newest",
        "number",
        "oldest",
        "rewound",
        "seen",
        "stirred",
        "strange",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.floor = -1
        self.oldest = BEGINNING
        self.newest = BEGINNING
        self.blocked: set[str] = set()
        self.strange = True
        """Its blocked keys and its head are to be read from the database."""
        self.dry = False
        """The last look found nothing."""
        self.in_flight = False
        self.stirred = False
        """Something may have come since the claim that is under way."""
        self.rewound: int | None = None
        self.seen: tuple[int, int | None] | None = None
        """Up to which seq a look saw what had committed, and, known from the next
        look on, an id above those of all transactions that were open then."""

    def rewind(self, seq: int, created_at: datetime) -> None:
        """Make a row claimable again."""
        self.floor = min(self.floor, seq - 1)
        self.oldest = min(self.oldest, created_at)
        # A claim may be under way, which raises the floor when it returns.
        if self.rewound is None or self.floor < self.rewound:
            self.rewound = self.floor
        self.seen = None
        self.stir()

    def picked(self) -> None:
        """Begin a flight; what happens from now on concerns its claim."""
        self.in_flight = True
        self.stirred = False
        self.rewound = None

    def stir(self) -> None:
        """Look at it again."""
        self.dry = False
        self.stirred = True

    def found_empty(self) -> None:
        """Leave it alone until it is stirred, unless it just was."""
        self.dry = not self.stirred

    def looked_up_to(self, seq: int, snapshot: Snapshot) -> None:
        """Raise the floor as far as no open transaction may still bring a row.

        Not at all if it was rewound while the look was under way. Between two looks
        at a lane a transaction of ours ends: it settled what the first had found, or
        marked the end of that look. (Settling draws an id even if it changes no row.)
        """
        if self.rewound is not None:
            return
        if self.seen is not None:
            seen, end = self.seen
            if end is None:
                self.seen = (seen, snapshot.end)
                return
            if snapshot.oldest >= end:
                self.floor = max(self.floor, min(seq, seen))
                self.seen = None
        if self.seen is None:
            self.seen = (seq, None)

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
        self.blocked = blocked
        oldest = since if head is None else min(head[1], since)
        # A row that was rewound under way may be older than the head was.
        self.oldest = min(
            oldest - SKEW if oldest > BEGINNING else BEGINNING,
            self.oldest if self.rewound is not None else since,
        )
        if head is not None:
            self.newest = head[1]
            if head[0] <= self.floor:
                self.rewind(*head)
