"""What this relay remembers of the messages of a lane that wait.

The log, `outbox.deferral`, has all of them; here is only what a claim must know at
once: which keys are held back, which of those may go on, and what is due. So memory
grows with the number of blocked keys, not with the messages behind them.

A key is *blocked* from the refusal of a message until nothing of it waits any more.
When its refused message, the *head*, is due or settled, the key *drains*: claims read
its messages from the log, in order of seq, up to the next head. What is added meanwhile
goes to the log as well, behind them. Only a claim that has read the log of a key to its
end takes new messages of it, in the same batch and after the rest.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from itertools import islice
from typing import Final, NamedTuple, Self
from uuid import UUID

from outbox.postgres.lane_cursor import LaneCursor

LONG_AGO: Final = datetime.fromisoformat("0001-01-03T00:00:00+00:00")
_LOWEST: Final = -(2**63)
_UNKEYED_CAUSES: Final = {"scheduled", "replayed"}


class Place(NamedTuple):
    """A message that waits: where it is, and its last entry in the log."""

    lane: int
    seq: int
    id: UUID
    created_at: datetime
    run: int
    attempts: int
    entry: int
    cause: str
    key: str | None

    @property
    def waits_for_time(self) -> bool:
        """Whether it waits for a moment, and not for its key."""
        return self.key is None or self.cause in _UNKEYED_CAUSES


class End(Enum):
    """What follows the messages of a key that may go on."""

    NOTHING = auto()
    HEAD = auto()
    """A refused message that is not due."""
    MORE = auto()


@dataclass(frozen=True, slots=True)
class Draining:
    """A key that drains, and those of its messages in the log that may go on."""

    key: str
    places: Sequence[Place]
    end: End

    @classmethod
    def read(
        cls, key: str, waiting: Iterable[tuple[Place, bool | None]], *, is_cut: bool
    ) -> Self:
        """Stop before a head that waits, and behind one that is due.

        Args:
            waiting: what waits of the key, in order of seq, and whether it is due: None
                if it only waits for its key.
            is_cut: the log has more of the key, perhaps.
        """
        places: list[Place] = []
        for place, is_due in waiting:
            if places and places[-1].cause != "blocked":
                return cls(key, places, End.MORE)
            if is_due is False:
                return cls(key, places, End.HEAD)
            places.append(place)
        return cls(key, places, End.MORE if is_cut else End.NOTHING)


class LogOfKey(NamedTuple):
    """What the log says of a key, or of all messages that wait for a moment.

    Attributes:
        key: None for messages that don't hold back their key.
        has_head: a refused message of it waits.
        has_ended: a message of it waits no more.
        seq, due_at, created_at: the lowest of those that wait; None if none does.
    """

    key: str | None
    has_head: bool
    has_ended: bool
    seq: int | None
    due_at: datetime | None
    created_at: datetime | None


class Deferrals:
    """The waiting messages of one lane. Pure bookkeeping, for one event loop.

    Attributes:
        blocked: keys whose new messages must wait.
        draining: those of them that may go on, each with a seq: nothing of the key
            waits at or below it.
        due: messages that are due, except the heads of keys.
        log: how far the log was read.
        due_up_to: the moment and the entry up to which due messages were found.
        since: nothing that waits was created earlier; None if nothing waits.
        more_is_due: the last scan found as much as it may.
    """

    __slots__ = (
        "_moves",
        "_restarted",
        "blocked",
        "draining",
        "due",
        "due_up_to",
        "log",
        "more_is_due",
        "since",
    )

    def __init__(self) -> None:
        self.blocked: set[str] = set()
        self.draining: dict[str, int] = {}
        self.due: dict[UUID, Place] = {}
        self.log = LaneCursor()
        self.due_up_to = (LONG_AGO, -1)
        self.since: datetime | None = None
        self.more_is_due = False
        self._moves = 0
        self._restarted: set[str] = set()

    @property
    def size(self) -> int:
        """How many messages and keys may be claimed, as far as is known."""
        return len(self.draining) + len(self.due)

    @property
    def has_work(self) -> bool:
        """Whether something that waited may be claimed."""
        return bool(self.draining or self.due)

    def read(self, log: LogOfKey) -> None:
        """Take in new entries of the log, those of other relays included."""
        if log.created_at is not None:
            self.note_created(log.created_at)
        if log.due_at is not None:
            self.expect(log.due_at)
        if log.key is None:
            return
        if log.seq is not None and log.key not in self.blocked:
            self.blocked.add(log.key)
            if not log.has_head:
                self.drain(log.key)
        elif log.seq is not None:
            self.hold(log.key, log.seq)
        if log.has_ended and not log.has_head:
            # Somebody else may have settled the head.
            self.drain(log.key)

    def note_created(self, moment: datetime) -> None:
        """Note that a message waits that was created then."""
        self.since = moment if self.since is None else min(self.since, moment)

    def block(self, key: str) -> None:
        """Hold back a key: a message of it was refused."""
        self.blocked.add(key)
        self.draining.pop(key, None)

    def hold(self, key: str, seq: int) -> None:
        """Note that a message went to the log because its key waits."""
        self.blocked.add(key)
        if key in self.draining:
            self.draining[key] = min(self.draining[key], seq - 1)

    def drain(self, key: str) -> None:
        """Read a blocked key from the log, from its beginning."""
        if key in self.blocked:
            self.draining[key] = _LOWEST
            self._restarted.add(key)

    def begin_claim(self) -> None:
        """Begin to read the keys that drain; a claim ends with `claimed` for each."""
        self._restarted.clear()

    def claimed(
        self, draining: Draining, left: Container[UUID], *, is_free: bool
    ) -> None:
        """Note that a claim has taken messages of a key, except some it left.

        Args:
            is_free: it has taken all that waits, so new messages may go.
        """
        key, places = draining.key, draining.places
        taken = [place for place in places if place.id not in left]
        if is_free:
            self.blocked.discard(key)
            self.draining.pop(key, None)
        elif key in self._restarted:
            # Its head has come due since.
            pass
        elif draining.end is End.HEAD and len(taken) == len(places):
            # Until its head is due.
            self.draining.pop(key, None)
        elif taken and key in self.draining:
            self.draining[key] = taken[-1].seq

    def release(self, place: Place) -> None:
        """Have a message claimed: it is due, or its claim came to nothing."""
        if place.key is None or place.waits_for_time:
            self.due[place.id] = place
        else:
            self.blocked.add(place.key)
            self.drain(place.key)

    def next_due(self, most: int) -> list[Place]:
        """Return some of what is due, in order of seq. It stays until `took`."""
        return sorted(islice(self.due.values(), most), key=lambda place: place.seq)

    def took(self, ids: Iterable[UUID]) -> None:
        """Forget what a claim has taken."""
        for id in ids:
            self.due.pop(id, None)

    def scan(self) -> int:
        """Begin to look for what is due; hand the result to `scanned`."""
        return self._moves

    def scanned(self, began: int, up_to: tuple[datetime, int], *, is_cut: bool) -> None:
        """Note how far a scan got, unless something was added meanwhile."""
        self.more_is_due = is_cut
        if began == self._moves:
            self.due_up_to = max(self.due_up_to, up_to)

    def expect(self, due_at: datetime) -> None:
        """Note that an entry is due at this moment, which may have passed."""
        self._moves += 1
        self.due_up_to = min(self.due_up_to, (due_at, -1))
