"""Decides whether a message may go: whether no earlier one of its key waits.

A message without a key waits for no other. A key is

- *free* if none of its messages waits: new ones may go;
- *blocked* once one of them, the *head*, was refused or got no answer: new ones are
  written to the log, `outbox.deferral`, and *wait* there behind it;
- *draining* once the head is due or settled: claims read its messages from the log, in
  order of seq, up to the next head. These are *next*: they may go. New ones are still
  written to the log, until a claim reads the log of the key to its end; that claim
  includes new ones as well, after those from the log, and the key is free.

A message that waits for a point in time is *due* once that has come. It may go if its
key is free; otherwise it waits behind the others.

Within a batch, a message may go if no earlier one of its key failed: see `BatchKeys`.

`LaneKeys` keeps only what a claim needs immediately: which keys are blocked, which of
these drain, and which messages are due. So memory grows with the number of blocked
keys, not with the messages behind them. A relay that takes over a lane reads its log in
portions, each before a claim. Until it has read all of it, claims ask the database
which of their keys are blocked.

All of this is pure bookkeeping; `tests/models/waiting.py` tries it in every
interleaving up to a bound.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum, auto
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple, Self, TypeAlias
from uuid import UUID

FAR_AWAY: Final = datetime.fromisoformat("9999-12-30T00:00:00+00:00")
LONG_AGO: Final = datetime.fromisoformat("0001-01-03T00:00:00+00:00")
_LOWEST: Final = -(2**63)
_LONG_KEY: Final = 64
_UNKEYED_CAUSES: Final = {"scheduled", "aside", "replayed", "cancelled"}
_BLOCKING: Final = {"refused", "postponed", "unknown"}
WAITING: Final = {*_BLOCKING, "scheduled", "blocked", "aside", "open"}
"""The causes with which a settlement makes a message wait."""

LaneKey: TypeAlias = tuple[int, str | None]
"""A key, after its lane."""


class WaitingMessage(NamedTuple):
    """A waiting message: its place in the table, and its last entry in the log.

    A row of `find_due.sql` and `find_next_of_keys.sql`.

    Attributes:
        due_at: None if it waits only for its key.
        now: when it was read, by the database's clock.
    """

    lane: int
    seq: int
    id: UUID
    created_at: datetime
    run: int
    attempts: int
    entry: int
    cause: str
    key: str | None
    due_at: datetime | None = None
    now: datetime = LONG_AGO

    @property
    def is_due(self) -> bool:
        """Whether its time has come."""
        return self.due_at is not None and self.due_at <= self.now

    @property
    def is_cancelled(self) -> bool:
        """Whether it is only to be ended."""
        return self.cause == "cancelled"

    @property
    def is_held(self) -> bool:
        """Whether a transaction is open that may cancel it."""
        return self.cause == "held"

    @property
    def waits_for_time(self) -> bool:
        """Whether it waits for a point in time rather than for its key."""
        return self.key is None or self.cause in _UNKEYED_CAUSES


class KeyEnd(Enum):
    """The end of the next messages of a key in the log."""

    NOTHING = auto()
    HEAD = auto()
    """A refused message that is not due."""
    MORE = auto()


@dataclass(frozen=True, slots=True)
class Draining:
    """A draining key, and its next messages in the log."""

    lane: int
    key: str
    next: Sequence[WaitingMessage]
    end: KeyEnd

    @classmethod
    def read(
        cls, lane: int, key: str, waiting: Iterable[WaitingMessage], *, is_cut: bool
    ) -> Self:
        """Read up to a head: stop before one that waits, and after one that is due.

        Args:
            waiting: the waiting messages of the key, in order of seq.
            is_cut: whether the log may contain more messages of the key.
        """
        following: list[WaitingMessage] = []
        for message in waiting:
            if following and following[-1].cause != "blocked":
                return cls(lane, key, following, KeyEnd.MORE)
            if message.due_at is not None and not message.is_due:
                return cls(lane, key, following, KeyEnd.HEAD)
            following.append(message)
        end = KeyEnd.MORE if is_cut else KeyEnd.NOTHING
        return cls(lane, key, following, end)


@dataclass(frozen=True, slots=True)
class WaitingClaim:
    """The waiting messages that a claim includes, of all its lanes.

    Attributes:
        due: those that are due, also if their key is blocked.
        keys: the draining keys.
        drained: the keys of which no other message waits, so new ones can follow.
        messages: the messages to load, in the order of the lanes.
        held: the due messages that wait on, because their key is blocked.
        left: the messages that did not fit into the claim.
    """

    due: Sequence[WaitingMessage] = ()
    keys: Sequence[Draining] = ()
    drained: frozenset[LaneKey] = frozenset()
    messages: Sequence[WaitingMessage] = ()
    held: Sequence[WaitingMessage] = ()
    left: frozenset[UUID] = frozenset()

    @classmethod
    def of(
        cls,
        lanes: Sequence[int],
        due: Sequence[WaitingMessage],
        keys: Sequence[Draining],
        blocked: Collection[LaneKey],
    ) -> Self:
        """Include what may go.

        Args:
            blocked: those keys of the due messages that are.
        """
        drained = {(it.lane, it.key) for it in keys if it.end is KeyEnd.NOTHING}
        stays = set(blocked) - drained
        messages = [message for draining in keys for message in draining.next]
        due_now = [it for it in due if not it.is_cancelled]
        messages += [it for it in due_now if (it.lane, it.key) not in stays]
        held = [it for it in due_now if (it.lane, it.key) in stays]
        order = {number: index for index, number in enumerate(lanes)}
        messages.sort(key=lambda message: (order[message.lane], message.seq))
        return cls(due, keys, frozenset(drained), messages, held)

    def cut(self, count: int) -> Self:
        """Leave all but the first messages for the next claim."""
        left = self.messages[count:]
        return replace(
            self,
            # A new message must not overtake one that is left, whatever that waited
            # for.
            drained=self.drained - {(message.lane, message.key) for message in left},
            left=frozenset(message.id for message in left),
        )


class LogOfKey(NamedTuple):
    """The sum of the entries of a key, or of messages that wait for a point in time.

    A row of `read_deferrals.sql`.

    Attributes:
        key: None for messages that don't block their key.
        has_head: whether a refused message of the key waits.
        has_ended: whether a message of the key has stopped waiting.
        seq, due_at, created_at: the lowest values among the waiting messages; None if
            none waits.
        top: the highest seq of the entries that were read of a lane; then there is no
            key.
        cut: the last one of these, if the lane may have more; `has_head` says whether
            the sequence was set back below it.
    """

    key: str | None
    has_head: bool
    has_ended: bool
    seq: int | None
    due_at: datetime | None
    created_at: datetime | None
    lane: int = 0
    top: int | None = None
    cut: int | None = None


class LaneKeys:
    """The keys and the waiting messages of one lane. For one event loop.

    Attributes:
        blocked: keys whose new messages must wait, each in its `short` form.
        draining: blocked keys that drain, each with a seq at or below which none of its
            messages waits.
        due: messages that are due, except the heads of keys.
        floor: entries at or below this one need not be read again; others may have
            committed since.
        due_up_to: the time and the entry up to which due messages were found.
        since: a time before which no waiting message was created; None if none waits.
        more_is_due: whether the last scan reached its limit.
        top: the highest seq of a message that the log is known to have.
    """

    __slots__ = (
        "_found",
        "_held_at",
        "_moves",
        "_restarted",
        "blocked",
        "draining",
        "due",
        "due_up_to",
        "floor",
        "more_is_due",
        "reading",
        "since",
        "top",
    )

    def __init__(self) -> None:
        self.top = -1
        self.blocked: set[str] = set()
        self.draining: dict[str, int] = {}
        self.due: dict[UUID, WaitingMessage] = {}
        self.floor = -1
        self.due_up_to = (LONG_AGO, -1)
        self.since: datetime | None = None
        self.more_is_due = False
        self._held_at: datetime | None = None
        """When the first message was due that may still be cancelled."""
        self._moves = 0
        self._restarted: set[str] = set()
        self.reading: tuple[int, int] | None = None
        """Up to which entry the log was read in portions, and what was `assigned` at
        the first one."""
        self._found: set[str] = set()

    @property
    def is_partly_read(self) -> bool:
        """Whether entries that a claim must know of may be unread."""
        return self.reading is not None

    @property
    def read_up_to(self) -> int:
        """The entry above which the log is to be read next."""
        return self.floor if self.reading is None else self.reading[0]

    @property
    def size(self) -> int:
        """The number of messages and keys known to be claimable."""
        return len(self.draining) + len(self.due)

    def is_blocked(self, key: str) -> bool:
        """Whether new messages of a key must wait, if the log was read."""
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

    def portion_read(self, cut: int | None, assigned: int) -> None:
        """Record that the log was read above `read_up_to`.

        A pass of several portions counts as one with the first one's snapshot: later
        portions saw all that it saw, and more.

        Args:
            cut: the entry at which the portion ended; None if it reached the end.
            assigned: an entry at or below which every one was visible, or never will
                be.
        """
        if self.reading is not None:
            _, assigned = self.reading
        if cut is not None:
            self.reading = cut, assigned
            return
        self.floor = max(self.floor, assigned)
        self.reading = None
        # A message that was held before the entries of its key were read has blocked
        # the key, so reading them didn't show whether the key can continue.
        for key in self._found:
            self.drain(key)
        self._found.clear()

    def restart_log(self) -> None:
        """Read the log from its beginning."""
        self.floor = -1
        self.reading = None

    def found_waiting(self, key: str) -> None:
        """Record that a message of a key waits, although the log is partly read."""
        self._found.add(key)

    def logged(self, seq: int) -> None:
        """Record that the log has a message."""
        self.top = max(self.top, seq)

    def has_logged(self, seq: int) -> bool:
        """Whether the log may have a message that no position covers."""
        return self.is_partly_read or seq <= self.top

    def note_created(self, moment: datetime) -> None:
        """Record that a message created at this time waits."""
        self.since = moment if self.since is None else min(self.since, moment)

    def waits(
        self, key: str | None, seq: int, created_at: datetime, cause: str
    ) -> None:
        """Record that a message waits from now on."""
        self.note_created(created_at)
        if key is not None and cause == "blocked":
            self.hold(key, seq)
        elif key is not None and cause in _BLOCKING:
            self.block(key)

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
        """Start reading the draining keys; the claim ends with `claimed`."""
        self._restarted.clear()

    def next_due(self, most: int) -> list[WaitingMessage]:
        """Return up to `most` due messages, in order of seq."""
        return sorted(islice(self.due.values(), most), key=lambda message: message.seq)

    def claimed(self, number: int, claim: WaitingClaim) -> None:
        """Record the messages of this lane that a claim has included.

        Args:
            number: the lane's.
        """
        for message in claim.due:
            if message.id not in claim.left:
                self.due.pop(message.id, None)
        for draining in claim.keys:
            if draining.lane == number:
                self._claimed(draining, claim)

    def _claimed(self, draining: Draining, claim: WaitingClaim) -> None:
        key = draining.key
        taken = [it for it in draining.next if it.id not in claim.left]
        if (draining.lane, key) in claim.drained:
            self.blocked.discard(short(key))
            self.draining.pop(key, None)
        elif key in self._restarted:
            # Its head has become due since the claim began.
            pass
        elif draining.end is KeyEnd.HEAD and len(taken) == len(draining.next):
            # The key stops draining until its head is due.
            self.draining.pop(key, None)
        elif taken and key in self.draining:
            self.draining[key] = taken[-1].seq

    def release(self, message: WaitingMessage) -> None:
        """Make a message claimable: it is due, or its last claim had no outcome."""
        if message.key is None or message.waits_for_time:
            self.due[message.id] = message
        else:
            self.blocked.add(short(message.key))
            self.drain(message.key)

    def scan(self) -> int:
        """Begin a scan for due messages; pass the returned value to `scanned`."""
        return self._moves

    def hold_due(self, due_at: datetime) -> None:
        """Record that a scan has found a message that may be cancelled still."""
        self._held_at = min(self._held_at or due_at, due_at)

    def scanned(self, began: int, up_to: tuple[datetime, int], *, is_cut: bool) -> None:
        """Record how far a scan got, unless something was added in the meantime.

        At its end, the next one begins again with the messages that it has held.
        """
        self.more_is_due = is_cut
        if began == self._moves:
            self.due_up_to = max(self.due_up_to, up_to)
        if self._held_at is not None and not is_cut:
            self.expect(self._held_at)
            self._held_at = None

    def expect(self, due_at: datetime) -> None:
        """Record that an entry is due at this time, which may have passed."""
        self._moves += 1
        self.due_up_to = min(self.due_up_to, (due_at, -1))


@dataclass(slots=True)
class BatchKeys:
    """The keys of a batch of which a message has failed.

    Attributes:
        closed: the keys of which a message waits: those behind it wait, too.
        charged: the keys of which a message was refused: no other one is charged.
    """

    closed: set[str] = field(default_factory=set)
    charged: set[str] = field(default_factory=set)

    def close(self, key: str | None) -> None:
        """Hold back the later messages of a key."""
        if key is not None:
            self.closed.add(key)

    def charge(self, key: str | None) -> None:
        """Record that a refusal of a key counts."""
        if key is not None:
            self.charged.add(key)


def short(key: str) -> str:
    """Return a key, or a digest if it is long, which no key equals.

    A key may have 2,048 bytes, and a million keys may be blocked.
    """
    if len(key) <= _LONG_KEY:
        return key
    # PostgreSQL's text, and so a key, contains no NUL.
    return "\0" + blake2b(key.encode(), digest_size=16).hexdigest()
