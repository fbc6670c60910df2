"""How far a lane has been read: the floor, and when it may rise.

The *floor* of a lane is the sequence number at or below which nothing is left to claim.
Claims start above it, so dead index entries behind it are never scanned again, not even
while another session's snapshot keeps vacuum from removing them.

The floor lags behind the claims. A writer draws its sequence number before it commits,
so a claim may find 12 and miss 11, whose transaction is still open. With the floor at
12, later messages of the key of 11 would overtake it. The rule:

1. A look sees everything that has committed up to some number, and remembers that
   number together with the next transaction id. The default of the `seq` column assigns
   a transaction its id before it draws a number, so any transaction that may still
   commit a row at or below that number has a lower id.
2. The floor rises to that number with the first later look whose snapshot shows that
   every transaction with a lower id has ended: that look saw all that they committed.

A backlog is read faster than that: each claim would read again what the previous one
had read. So the owner of the cursors records, from time to time, the last number drawn,
and then gets a transaction id. If every transaction with a lower id has ended when a
look takes its snapshot, every row with that number or a lower one is committed or never
will be, and the look raises the floor itself.

Anything that makes a row claimable again rewinds the cursor: the floor is lowered, and
the remembered number is forgotten. A look in progress then raises nothing, and the next
look starts from the lower floor.

`tests/models/test_lane_cursor.py` tries every interleaving up to a bound.
"""

from typing import NamedTuple, Self


class Snapshot(NamedTuple):
    """The part of a statement's snapshot that a lane's floor depends on."""

    xmin: int
    """Every transaction with a lower id had ended."""
    next_xid: int
    """No transaction had been assigned this id, or a higher one."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Read `xmin:age`, where the age counts the ids assigned from xmin on.

        The SQL expression is
        `concat_ws(':', pg_snapshot_xmin(s), age(pg_snapshot_xmin(s)::xid))`, with
        `pg_current_snapshot()` for `s`. PostgreSQL computes `age` once per
        transaction, and from the transaction's own id if it has one. So the snapshot
        must be the transaction's first, and older than its id.
        """
        xmin, age = text.split(":")
        return cls(int(xmin), int(xmin) + int(age))


class Drawn:
    """Which numbers of a sequence had been drawn by when. For one event loop."""

    __slots__ = ("_noted",)

    def __init__(self) -> None:
        self._noted: list[tuple[int, int]] = []

    def note(self, seq: int, transaction_id: int) -> None:
        """Record that `seq` was drawn before this transaction was assigned its id."""
        self._noted.append((transaction_id, seq))

    def before(self, snapshot: Snapshot) -> int:
        """Return a number at or below which no open transaction may commit a row.

        A transaction that is open in the snapshot, or begins later, is assigned its id,
        and draws its numbers, after that number. Returns -1 if none is known.
        """
        passed = [seq for id, seq in self._noted if id <= snapshot.xmin]
        if not passed:
            return -1
        del self._noted[: len(passed) - 1]
        return passed[-1]


class LaneCursor:
    """The floor of one lane. Pure bookkeeping, for one event loop, one look at a time.

    Attributes:
        floor: nothing at or below this sequence number is left to claim; -1 at first.
    """

    __slots__ = ("_candidate", "floor")

    def __init__(self) -> None:
        self.floor = -1
        self._candidate: tuple[int, int] | None = None
        """The number up to which a look saw what had committed, and the transaction id
        that was next at the time."""

    def looked(self, up_to: int, snapshot: Snapshot, drawn: int = -1) -> None:
        """Raise the floor as far as no open transaction may still commit a row.

        Args:
            up_to: a number up to which the look saw every claimable row above the
                floor, and which had been drawn when its snapshot was taken.
            snapshot: the snapshot of the look.
            drawn: a number that had been drawn before the id `snapshot.xmin` was
                assigned; -1 if none is known.
        """
        self.floor = max(self.floor, min(up_to, drawn))
        if self._candidate is not None:
            candidate, next_xid = self._candidate
            if snapshot.xmin >= next_xid:
                self.floor = max(self.floor, min(up_to, candidate))
                # Above `up_to` it stays valid, and a later look may reach further.
                if up_to >= candidate:
                    self._candidate = None
        self.remember(up_to, snapshot)

    def remember(self, up_to: int, snapshot: Snapshot) -> None:
        """Let a later look raise the floor to `up_to`; this one raises nothing."""
        if self._candidate is None:
            self._candidate = (up_to, snapshot.next_xid)

    def start_at(self, watermark: int) -> None:
        """Raise the floor to a number up to which every row was verified."""
        self.floor = max(self.floor, watermark)

    def restart(self) -> None:
        """Start over, because the sequence was set back."""
        self.fall_back(-1)

    def rewind(self, seq: int) -> None:
        """Make a row claimable again."""
        self.fall_back(seq - 1)

    def fall_back(self, floor: int) -> None:
        """Lower the floor, and start over above it."""
        self.floor = min(self.floor, floor)
        self._candidate = None
