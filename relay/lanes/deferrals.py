"""What this relay remembers about the waiting messages of a lane.

The log, `outbox.deferral`, has all of them; this module keeps only what a claim must
know at once: which keys are blocked, which of those may continue, and what is due. So
memory grows with the number of blocked keys, not with the messages behind them.

A key is *blocked* from the refusal of a message until none of its messages waits. When
its refused message, the *head*, is due or settled, the key *drains*: claims read its
messages from the log, in order of seq, up to the next head. Messages added in the
meantime go to the log as well, behind them. Only a claim that has read the log of a key
to its end takes new messages of it, in the same batch and after those from the log.
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


class WaitingMessage(NamedTuple):
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
        """Whether it waits for a point in time, not for its key."""
        return self.key is None or self.cause in _UNKEYED_CAUSES


class KeyEnd(Enum):
    """What follows the messages of a key that may continue."""

    NOTHING = auto()
    HEAD = auto()
    """A refused message that is not due."""
    MORE = auto()


@dataclass(frozen=True, slots=True)
class Draining:
    """A draining key, and those of its messages in the log that may continue."""

    key: str
    places: Sequence[WaitingMessage]
    end: KeyEnd

    @classmethod
    def read(
        cls,
        key: str,
        waiting: Iterable[tuple[WaitingMessage, bool | None]],
        *,
        is_cut: bool,
    ) -> Self:
        """Read up to a head: stop before one that waits, and after one that is due.

        Args:
            waiting: the waiting messages of the key, in order of seq, each with whether
                it is due; None if it only waits for its key.
            is_cut: the log may have more messages of the key.
        """
        places: list[WaitingMessage] = []
        for place, is_due in waiting:
            if places and places[-1].cause != "blocked":
                return cls(key, places, KeyEnd.MORE)
            if is_due is False:
                return cls(key, places, KeyEnd.HEAD)
            places.append(place)
        return cls(key, places, KeyEnd.MORE if is_cut else KeyEnd.NOTHING)


class LogOfKey(NamedTuple):
    """What the log says of a key, or of all messages that wait for a point in time.

    Attributes:
        key: None for messages that don't block their key.
        has_head: a refused message of the key waits.
        has_ended: a message of the key has stopped waiting.
        seq, due_at, created_at: the lowest of the messages that wait; None if none
            waits.
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
        draining: blocked keys that may continue, each with a seq at or below which none
            of its messages waits.
        due: messages that are due, except the heads of keys.
        log: how far the log has been read.
        due_up_to: the moment and the entry up to which due messages were found.
        since: no waiting message was created earlier; None if none waits.
        more_is_due: the last scan reached its limit.
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
        self.due: dict[UUID, WaitingMessage] = {}
        self.log = LaneCursor()
        self.due_up_to = (LONG_AGO, -1)
        self.since: datetime | None = None
        self.more_is_due = False
        self._moves = 0
        self._restarted: set[str] = set()

    @property
    def size(self) -> int:
        """How many messages and keys may be claimed, as far as known."""
        return len(self.draining) + len(self.due)

    @property
    def has_work(self) -> bool:
        """Whether something that waited may be claimed."""
        return bool(self.draining or self.due)

    def read(self, log: LogOfKey) -> None:
        """Process new entries of the log, including those of other relays."""
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
            # Another process may have settled the head.
            self.drain(log.key)

    def note_created(self, moment: datetime) -> None:
        """Record that a message created at this moment waits."""
        self.since = moment if self.since is None else min(self.since, moment)

    def block(self, key: str) -> None:
        """Block a key: a message of it was refused."""
        self.blocked.add(key)
        self.draining.pop(key, None)

    def hold(self, key: str, seq: int) -> None:
        """Record that a message went to the log because its key is blocked."""
        self.blocked.add(key)
        if key in self.draining:
            self.draining[key] = min(self.draining[key], seq - 1)

    def drain(self, key: str) -> None:
        """Drain a blocked key, from its first message in the log."""
        if key in self.blocked:
            self.draining[key] = _LOWEST
            self._restarted.add(key)

    def begin_claim(self) -> None:
        """Start reading the keys that drain; the claim ends with `claimed` for each."""
        self._restarted.clear()

    def claimed(
        self, draining: Draining, left: Container[UUID], *, is_free: bool
    ) -> None:
        """Record that a claim has taken messages of a key, except those in `left`.

        Args:
            is_free: the claim has taken all that wait, so new messages may follow.
        """
        key, places = draining.key, draining.places
        taken = [place for place in places if place.id not in left]
        if is_free:
            self.blocked.discard(key)
            self.draining.pop(key, None)
        elif key in self._restarted:
            # Its head has become due since then.
            pass
        elif draining.end is KeyEnd.HEAD and len(taken) == len(places):
            # It stops draining until its head is due.
            self.draining.pop(key, None)
        elif taken and key in self.draining:
            self.draining[key] = taken[-1].seq

    def release(self, place: WaitingMessage) -> None:
        """Make a message claimable: it is due, or its last claim had no outcome."""
        if place.key is None or place.waits_for_time:
            self.due[place.id] = place
        else:
            self.blocked.add(place.key)
            self.drain(place.key)

    def next_due(self, most: int) -> list[WaitingMessage]:
        """Return up to `most` due messages, in order of seq; they stay until `took`."""
        return sorted(islice(self.due.values(), most), key=lambda place: place.seq)

    def took(self, ids: Iterable[UUID]) -> None:
        """Forget due messages that a claim has taken."""
        for id in ids:
            self.due.pop(id, None)

    def scan(self) -> int:
        """Begin a scan for due messages; pass the returned value to `scanned`."""
        return self._moves

    def scanned(self, began: int, up_to: tuple[datetime, int], *, is_cut: bool) -> None:
        """Record how far a scan got, unless something was added in the meantime."""
        self.more_is_due = is_cut
        if began == self._moves:
            self.due_up_to = max(self.due_up_to, up_to)

    def expect(self, due_at: datetime) -> None:
        """Record that an entry is due at this moment, which may have passed."""
        self._moves += 1
        self.due_up_to = min(self.due_up_to, (due_at, -1))
