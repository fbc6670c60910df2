"""Which rows of a lane and day a reader has read: the position.

Rows don't commit in the order of their seqs. A reader that only remembered the last seq
would miss those that commit later with a lower one; waiting for them would hold up all
others. So the position also has the snapshot of the claim that read up to this seq: of
the rows at or below it, the claim found those that are visible in this snapshot, and no
others. This holds for any number of transactions, however long they stay open.

A claim that finds more late rows than fit into a batch reads them in order of seq, too.
Until it has read all of them, the position has a *late part*: up to a lower seq, a
newer snapshot counts.

A transaction gets its id before it draws a seq, rows have the id of their top-level
transaction, and no row is ever updated.
"""

from typing import Final, NamedTuple, Self

from typing_extensions import override


class Snapshot(NamedTuple):
    """Which transactions had committed at some moment, as `pg_snapshot` has it.

    On a standby, `pg_current_snapshot()` leaves out transactions in progress, so its
    result there must not be used.
    """

    xmin: int
    """Every transaction with a lower id had ended."""
    xmax: int
    """No transaction with this id, or a higher one, had ended. Some may have begun."""
    in_progress: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text form, `xmin:xmax:xip_list`."""
        xmin, xmax, ids = text.split(":")
        return cls(
            int(xmin), int(xmax), frozenset(map(int, filter(None, ids.split(","))))
        )

    @override
    def __str__(self) -> str:
        """Return the text form."""
        return f"{self.xmin}:{self.xmax}:{','.join(map(str, sorted(self.in_progress)))}"

    def visible(self, xid: int) -> bool:
        """Whether this transaction had ended, like `pg_visible_in_snapshot`."""
        return xid < self.xmin or (xid < self.xmax and xid not in self.in_progress)


NOTHING: Final = Snapshot(1, 1)
"""The snapshot in which no transaction is visible."""


class Position(NamedTuple):
    """How far a reader has read a lane and day; by default, not at all."""

    up_to: int = -1
    snapshot: Snapshot = NOTHING
    late_up_to: int | None = None
    """While there is a late part, its seq; lower than `up_to`."""
    late_snapshot: Snapshot | None = None
    """The snapshot of the late part. What is visible in `snapshot` is visible in it."""

    def covers(self, seq: int, xid: int, base: int = -1) -> bool:
        """Whether the reader has read a row.

        Args:
            seq: the seq of the row.
            xid: the id of the top-level transaction that wrote it.
            base: the last seq of rows that came from another cluster with a dump. Their
                ids mean nothing here; nobody can add to these rows, so seqs suffice.
        """
        if seq > self.up_to:
            return False
        if seq <= base or self.snapshot.visible(xid):
            return True
        late_up_to, late_snapshot = self.late_up_to, self.late_snapshot
        return (
            late_up_to is not None
            and seq <= late_up_to
            and (late_snapshot is not None and late_snapshot.visible(xid))
        )

    def extend(self, up_to: int, snapshot: Snapshot) -> Self:
        """Cover what a claim has read, too: rows up to a seq, visible in its snapshot.

        The claim must have read every row for which this holds. An earlier late part
        must be as of the same snapshot, or not go beyond `up_to`: a position has no
        third part.
        """
        if up_to >= self.up_to:
            return type(self)(up_to, snapshot)
        return self._replace(late_up_to=up_to, late_snapshot=snapshot)
