"""The view that a statement has of a log."""

from typing import NamedTuple

from pillarbox.outbox.log.position import Snapshot


class ReadView(NamedTuple):
    """The snapshot of a statement, and the numbers assigned by then."""

    snapshot: Snapshot
    next_xid: int
    """The next transaction id."""
    seq: int
    """The last seq assigned."""
    file: int
    """The file of the sequence; another one begins again."""

    @classmethod
    def parse(cls, text: str) -> "ReadView":
        """Read `snapshot/age/seq/file`; the age counts the ids from xmin on.

        PostgreSQL computes `age` once per transaction, and from the transaction's own
        id if it has one. So the snapshot must be the transaction's first, and older
        than its id.
        """
        snapshot, age, seq, file = text.split("/")
        parsed = Snapshot.parse(snapshot)
        return cls(parsed, parsed.xmin + int(age), int(seq), int(file))

    def follows(self, seq: int, file: int) -> bool:
        """Whether the sequence has only advanced since; file 0: any could follow."""
        return file == 0 or (self.file == file and self.seq >= seq)
