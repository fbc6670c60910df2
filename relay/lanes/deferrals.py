"""What this relay remembers about the waiting messages of a lane.

The log, `outbox.deferral`, contains all of them. This module keeps only what a claim
needs immediately: which keys are blocked, which of these can continue, and which
messages are due. So memory grows with the number of blocked keys, not with the messages
behind them.

A key is *blocked* from the refusal of a message until none of its messages waits. When
its refused message, the *head*, is due or settled, the key *drains*: claims read its
messages from the log, in order of seq, up to the next head. Messages added in the
meantime go to the log as well, behind them. Only a claim that reads the log of a key to
its end includes new messages of the key, in the same batch, after those from the log.

A relay that takes over a lane reads its log in portions, each before a claim. Until it
has read all of it, claims ask the database which of their keys are blocked.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple, Self
from uuid import UUID

LONG_AGO: Final = datetime.fromisoformat("0001-01-03T00:00:00+00:00")
_LOWEST: Final = -(2**63)
_LONG_KEY: Final = 64
_UNKEYED_CAUSES: Final = {"scheduled", "aside", "replayed"}


class WaitingMessage(NamedTuple):
    """A waiting message: where it is, and its last entry in the log."""

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
        """Whether it waits for a point in time rather than for its key."""
        return self.key is None or self.cause in _UNKEYED_CAUSES


class KeyEnd(Enum):
    """What follows those messages of a key that can continue."""

    NOTHING = auto()
    HEAD = auto()
    """A refused message that is not due."""
    MORE = auto()


@dataclass(frozen=True, slots=True)
class Draining:
    """A draining key, and those of its messages in the log that can continue."""

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
                it is due; None if it waits only for its key.
            is_cut: whether the log may contain more messages of the key.
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
    """What the log says about a key, or about messages that wait for a point in time.

    A row of `read_deferrals.sql`.

    Attributes:
        key: None for messages that don't block their key.
        has_head: whether a refused message of the key waits.
        has_ended: whether a message of the key has stopped waiting.
        seq, due_at, created_at: the lowest values among the waiting messages; None if
            none waits.
        cut: the last entry that was read of a lane that may have more; then there is
            no key, and `has_head` says whether the sequence was set back below it.
    """

    key: str | None
    has_head: bool
    has_ended: bool
    seq: int | None
    due_at: datetime | None
    created_at: datetime | None
    lane: int = 0
    cut: int | None = None


class _Reading(NamedTuple):
    """A pass over the log that takes several portions.

    Attributes:
        position: the entry up to which the log has been read.
        drawn: see `Deferrals.portion_read`; that of the first portion.
    """

    position: int
    drawn: int


class Deferrals:
    """The waiting messages of one lane. Pure bookkeeping, for one event loop.

    Attributes:
        blocked: keys whose new messages must wait, each in its `short` form.
        draining: blocked keys that can continue, each with a seq at or below which none
            of its messages waits.
        due: messages that are due, except the heads of keys.
        floor: entries at or below this one need not be read again; others may have
            committed since.
        due_up_to: the time and the entry up to which due messages were found.
        since: a time before which no waiting message was created; None if none waits.
        more_is_due: whether the last scan reached its limit.
    """

    __slots__ = (
        "_found",
        "_moves",
        "_reading",
        "_restarted",
        "blocked",
        "draining",
        "due",
        "due_up_to",
        "floor",
        "more_is_due",
        "since",
    )

    def __init__(self) -> None:
        self.blocked: set[str] = set()
        self.draining: dict[str, int] = {}
        self.due: dict[UUID, WaitingMessage] = {}
        self.floor = -1
        self.due_up_to = (LONG_AGO, -1)
        self.since: datetime | None = None
        self.more_is_due = False
        self._moves = 0
        self._restarted: set[str] = set()
        self._reading: _Reading | None = None
        self._found: set[str] = set()

    @property
    def is_partly_read(self) -> bool:
        """Whether entries that a claim must know of may be unread."""
        return self._reading is not None

    @property
    def read_up_to(self) -> int:
        """The entry above which the log is to be read next."""
        return self.floor if self._reading is None else self._reading.position

    @property
    def size(self) -> int:
        """The number of messages and keys known to be claimable."""
        return len(self.draining) + len(self.due)

    @property
    def has_work(self) -> bool:
        """Whether messages that waited can be claimed."""
        return bool(self.draining or self.due)

    def is_blocked(self, key: str) -> bool:
        """Whether new messages of a key must wait."""
        return short(key) in self.blocked

    def read(self, log: LogOfKey) -> None:
        """Process new log entries, including those of other relays."""
        if log.created_at is not None:
            self.note_created(log.created_at)
        if log.due_at is not None:
            self.expect(log.due_at)
        if log.key is None:
            return
        if log.seq is not None and not self.is_blocked(log.key):
            self.blocked.add(short(log.key))
            if not log.has_head:
                self.drain(log.key)
        elif log.seq is not None:
            self.hold(log.key, log.seq)
        if log.has_ended and not log.has_head:
            # Another process may have settled the head.
            self.drain(log.key)

    def portion_read(self, cut: int | None, drawn: int) -> None:
        """Record that the log was read above `read_up_to`.

        A pass of several portions counts as one with the first one's snapshot: later
        portions saw all that it saw, and more.

        Args:
            cut: the entry at which the portion ended; None if it reached the end.
            drawn: an entry at or below which every one was visible, or never will be.
        """
        if self._reading is None:
            self._reading = _Reading(self.floor, drawn)
        if cut is not None:
            self._reading = self._reading._replace(position=cut)
            return
        self.floor = max(self.floor, self._reading.drawn)
        self._reading = None
        # A message that was held before the entries of its key were read has blocked
        # the key, so reading them didn't show whether the key can continue.
        for key in self._found:
            self.drain(key)
        self._found.clear()

    def restart_log(self) -> None:
        """Read the log from its beginning."""
        self.floor = -1
        self._reading = None

    def found_waiting(self, key: str) -> None:
        """Record that a message of a key waits, although the log is partly read."""
        self._found.add(key)

    def note_created(self, moment: datetime) -> None:
        """Record that a message created at this time waits."""
        self.since = moment if self.since is None else min(self.since, moment)

    def block(self, key: str) -> None:
        """Block a key, because one of its messages was refused."""
        self.blocked.add(short(key))
        self.draining.pop(key, None)

    def hold(self, key: str, seq: int) -> None:
        """Record that a message went to the log because its key is blocked."""
        self.blocked.add(short(key))
        if key in self.draining:
            self.draining[key] = min(self.draining[key], seq - 1)

    def drain(self, key: str) -> None:
        """Drain a blocked key, from its first message in the log."""
        if self.is_blocked(key):
            self.draining[key] = _LOWEST
            self._restarted.add(key)

    def begin_claim(self) -> None:
        """Start reading the draining keys; the claim ends with `claimed` for each."""
        self._restarted.clear()

    def claimed(
        self, draining: Draining, left: Container[UUID], *, is_free: bool
    ) -> None:
        """Record that a claim included the messages of a key, except those in `left`.

        Args:
            is_free: whether the claim included all that wait, so new ones can follow.
        """
        key, places = draining.key, draining.places
        taken = [place for place in places if place.id not in left]
        if is_free:
            self.blocked.discard(short(key))
            self.draining.pop(key, None)
        elif key in self._restarted:
            # Its head has become due since the claim began.
            pass
        elif draining.end is KeyEnd.HEAD and len(taken) == len(places):
            # The key stops draining until its head is due.
            self.draining.pop(key, None)
        elif taken and key in self.draining:
            self.draining[key] = taken[-1].seq

    def release(self, place: WaitingMessage) -> None:
        """Make a message claimable: it is due, or its last claim had no outcome."""
        if place.key is None or place.waits_for_time:
            self.due[place.id] = place
        else:
            self.blocked.add(short(place.key))
            self.drain(place.key)

    def next_due(self, most: int) -> list[WaitingMessage]:
        """Return up to `most` due messages, in order of seq; they stay until `took`."""
        return sorted(islice(self.due.values(), most), key=lambda place: place.seq)

    def took(self, ids: Iterable[UUID]) -> None:
        """Forget due messages that a claim included."""
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
        """Record that an entry is due at this time, which may have passed."""
        self._moves += 1
        self.due_up_to = min(self.due_up_to, (due_at, -1))


def short(key: str) -> str:
    """Return a key, or a digest if it is long, which no key equals.

    A key may have 2,048 bytes, and a million keys may be blocked.
    """
    if len(key) <= _LONG_KEY:
        return key
    # PostgreSQL's text, and so a key, contains no NUL.
    return "\0" + blake2b(key.encode(), digest_size=16).hexdigest()
