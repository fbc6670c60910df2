"""A lane whose messages are handled in this process, and end in any order.

Claims read on while handlers run. `outbox/log/window.py` has the two positions of the
lane: how far it is read, and how far that is stored. A message that a claim withholds
or a handler refuses gets its entry in the log in the transaction that stores a position
beyond it. Messages before it whose handlers run get entries there, too: they are
*open*. The settlement waits a moment for such handlers. Until it is stored, the lane
isn't claimed, so no claim meets a key whose refusal is not in the log yet.

What has ended is settled only if its window still exists: a lost session or lease, or
the settlement of another process, begins another one. Then its message is claimed
again, and handed over when the handler from before has ended.

Messages *ahead* were found by a search for their tenants before a claim has reached
them. Nothing is stored of them until then: those that were handled come again after a
kill, and those that were refused wait for the claim, and so does the rest of their key.

`tests/models/direct.py` explores the rule for entries over all interleavings.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self

from typing_extensions import override

from outbox.lane import LANES
from outbox.log.lane import Advance, Extent
from outbox.log.progress import Day, Progress, Stored
from outbox.log.takeover import SKEW
from outbox.log.window import Place, Window
from relay.lanes.batch import (
    BLOCKED,
    PUBLISHED,
    UNKNOWN,
    UNTOUCHED,
    ClaimedMessage,
    Disposition,
)
from relay.lanes.keys import WaitingMessage
from relay.lanes.lane import Lane
from relay.publisher import Acked, Confirmation

if TYPE_CHECKING:
    from outbox.message import Message

OPEN: Final = Disposition("open", delay=0)
"""Its handler runs."""
OPEN_AFTER: Final = 60.0
"""Seconds after which a message gets an entry, if others have ended behind it."""
MOST_AHEAD: Final = 2048
"""So many of a process can end ahead of the claims: after a kill, they come again."""
MOST_AGAIN: Final = 2048 // LANES
"""So many can end behind one before it gets an entry: after a kill, they come, too."""
_PATIENCE: Final = 0.05
"""Seconds that a settlement waits for handlers, rather than give them entries."""
_NO_NUMBER: Final = -1

Decided = tuple[ClaimedMessage, Disposition]


class Keeper(Protocol):
    """Who hands messages over, and settles them."""

    def may_begin(self, held: "HeldMessage") -> bool:
        """Return whether the handler of a message may begin."""

    def end(self, held: "HeldMessage", answer: Confirmation | None) -> None:
        """Record how the handler of a message has ended."""


@dataclass(slots=True, eq=False)
class HeldMessage:
    """A message that was handed over, until it is settled.

    Attributes:
        row: as it was claimed last.
        window: that of its lane at that time.
        since: when it was claimed first, as `time.monotonic()`.
        is_open: its handler has not ended.
        is_ahead: no claim has reached it.
    """

    row: ClaimedMessage
    lane: "WindowLane"
    window: Window
    since: float
    is_open: bool = True
    is_ahead: bool = False

    @property
    def message(self) -> "Message":
        """The message, as far as it could be read."""
        assert self.row.message is not None
        return self.row.message

    @property
    def problem(self) -> str | None:
        """Why it can't be handled as a message; None if it can."""
        return self.row.problem

    @property
    def attempts(self) -> int:
        """How often it has failed."""
        return self.row.attempts

    @property
    def created_at(self) -> datetime:
        """When it was added."""
        return self.row.created_at

    @property
    def leased(self) -> tuple[int, datetime | None]:
        """Its lane, and when this process took it, by the database's clock."""
        return self.lane.number, self.lane.leased_at

    @property
    def place(self) -> Place:
        """Its place in the window."""
        return self.row.seq, self.row.created_at

    def opened(self) -> None:
        """Record that the log says that its handler runs."""
        row = self.row
        self.row = row._replace(
            waiting=WaitingMessage(
                row.lane,
                row.seq,
                row.id,
                row.created_at,
                0,
                row.attempts,
                _NO_NUMBER,
                "open",
                row.key,
            )
        )

    def begin(self) -> bool:
        """Return whether it may be started: its lane has been leased all the time."""
        return self.lane.keeper.may_begin(self)

    def end(self, answer: Confirmation | None) -> None:
        """Record its outcome; None: it was not started."""
        self.lane.keeper.end(self, answer)


class LaneSettlement(NamedTuple):
    """What a lane stores next.

    Attributes:
        advance: its positions; None if these stay.
        published: how many new messages were handled.
        others: messages that get an entry.
        log: those of them that had none so far.
        opened: those of them whose handlers run.
        taken: what of the lane is settled, or kept.
        kept: what has to wait for handlers.
    """

    advance: "Advance[WindowLane] | None"
    published: int
    others: Sequence[Decided]
    log: Sequence[Decided]
    opened: Sequence[HeldMessage]
    taken: "_Unsettled"
    kept: "_Unsettled"


class _Unsettled(NamedTuple):
    """What has ended, but isn't stored.

    Attributes:
        ended: messages that were handled.
        refused: messages that are handled again later, or were given back.
        withheld: messages that were not handed over.
    """

    ended: list[tuple[HeldMessage, Disposition]]
    refused: list[tuple[HeldMessage, Disposition]]
    withheld: list[Decided]

    @classmethod
    def none(cls) -> Self:
        return cls([], [], [])


class WindowLane(Lane):
    """One leased lane. Only its own methods change it.

    Args:
        stale: its messages in hand that were claimed in a window that has ended.
        keeper: who gets and settles its messages.

    Attributes:
        window: how far it is read, and how far that is stored; None: it must be taken
            over.
        held: its messages in hand, by their identities.
        log_by: when a settlement waits for handlers no longer, as `time.monotonic()`.
        needs_claim: what must be settled has to wait until late rows are read.
    """

    __slots__ = (
        "_behind",
        "_ended_ahead",
        "_moves",
        "_to_drain",
        "_unsettled",
        "held",
        "keeper",
        "log_by",
        "needs_claim",
        "stale",
        "window",
    )

    def __init__(
        self, number: int, stale: dict[Hashable, HeldMessage], keeper: Keeper
    ) -> None:
        self.stale = stale
        self.keeper = keeper
        self.held: dict[Hashable, HeldMessage] = {}
        self._behind: list[HeldMessage] = []
        """Messages that follow stale ones of their key, and are handed over then."""
        self._forget()
        super().__init__(number)

    def _forget(self) -> None:
        behind = {id(held) for held in self._behind}
        self.stale |= {
            identity: held
            for identity, held in self.held.items()
            if held.is_open and id(held) not in behind
        }
        self.held = {}
        self._behind = []
        self._ended_ahead: dict[Hashable, tuple[HeldMessage, Disposition]] = {}
        self._unsettled = _Unsettled.none()
        self.window: Window | None = None
        self.log_by = 0.0
        self.needs_claim = False
        self._moves = False
        self._to_drain: set[str | None] = set()
        """Keys whose log a claim may have read to its end, without what waits here."""

    @property  # type: ignore[explicit-override]
    @override
    def progress(self) -> Progress | None:
        """How far claims have read."""
        return None if self.window is None else self.window.read

    @progress.setter
    def progress(self, progress: Progress | None) -> None:
        if progress is None:
            self._forget()
        else:
            assert self.window is not None
            self.window.read = progress

    @override
    def continue_with(self, progress: Progress) -> None:
        if self.window is None or self.window.stored.number != progress.number:
            self._forget()
            self.window = Window(progress)
        else:
            self.window.read_days(progress)

    @override
    def move_fence(self, day: Day) -> None:
        """Do nothing: handlers run, and a settlement moves it."""

    @override
    def advance(self, extent: Extent) -> None:
        if extent.up_to >= 0 or not extent.is_cut:
            self._claimed((), extent)

    @override
    def settled(self, after: Progress, at: float) -> None:
        self.known_at = at
        self.skipped = 0

    @property
    @override
    def is_used(self) -> bool:
        return bool(self.held or self.stale)

    @property
    def has_ended(self) -> bool:
        """Whether there is something to settle."""
        return any(self._unsettled) or self.must_move

    @property
    def must_settle(self) -> bool:
        """Whether it must be settled before it is claimed again."""
        return bool(self._unsettled.refused or self._unsettled.withheld)

    @property
    def must_move(self) -> bool:
        """Whether to store the positions of all days.

        The last ones must not be of a day that is long past: claims read it.
        """
        if self.window is None:
            return False
        stored = self.window.stored
        return self._moves or (
            stored.number > 0
            and self.read_at is not None
            and max(stored.fence).ends_at < self.read_at - SKEW
        )

    def take(
        self,
        rows: Sequence[ClaimedMessage],
        withheld: Iterable[Decided],
        extent: Extent | None,
        now: float,
    ) -> list[HeldMessage]:
        """Record a claim; return the messages to hand over.

        Args:
            rows: those that may be handled.
            extent: how far it has read the lane, if it has found messages there.
            now: the time, as `time.monotonic()`.
        """
        assert self.window is not None
        withheld = [*withheld]
        for row in (*rows, *(row for row, _ in withheld)):
            known = self.held.get(row.identity)
            if known and row.waiting is not None and known.row.waiting is None:
                # Another process has given it an entry, and settled first.
                self.doubt()
                return []
        if extent is not None:
            new = [row for row in rows if row.waiting is None]
            new += [row for row, _ in withheld if row.waiting is None]
            self._claimed(map(place_of, new), extent)
            self._moves = self._moves or not new
            reached = {row.identity for row in new if self._reach(row, now)}
            if reached:
                rows = [row for row in rows if row.identity not in reached]
                withheld = [one for one in withheld if one[0].identity not in reached]
        if self.needs_claim:
            self._to_drain |= self._closed()
        self.needs_claim = False
        closed = self._closed()
        handed: list[HeldMessage] = []
        for row in rows:
            known = self.held.get(row.identity)
            if known is not None:
                # It is in the log since its handler has begun.
                known.row = row
            elif row.key in closed:
                withheld.append((row, BLOCKED))
                self._to_drain.add(row.key)
            else:
                held = HeldMessage(row, self, self.window, now)
                self.held[row.identity] = held
                (self._behind if self._is_behind(held) else handed).append(held)
        if withheld:
            self._wait(now)
            self._unsettled.withheld.extend(withheld)
        return handed

    @property
    def top(self) -> int | None:
        """The seq above which no claim has read; None: it can't be searched now."""
        is_read = not (self.needs_refresh or self.keys.is_partly_read)
        if not is_read or self.window is None or self.window.read.as_of is not None:
            return None
        return max(position.up_to for _, position in self.window.read.days)

    @property
    def ended_ahead(self) -> int:
        """How many messages ahead have ended."""
        return len(self._ended_ahead)

    @property
    def ahead(self) -> list[Place]:
        """The places of the messages ahead that were found."""
        ended = [held for held, _ in self._ended_ahead.values()]
        return [it.place for it in (*self.held.values(), *ended) if it.is_ahead]

    @property
    def closed_ahead(self) -> set[str]:
        """The keys of which a message ahead was refused."""
        refused = (it for it, how in self._ended_ahead.values() if how is not PUBLISHED)
        return {held.row.key for held in refused if held.row.key is not None}

    def take_ahead(
        self, rows: Iterable[ClaimedMessage], now: float
    ) -> list[HeldMessage]:
        """Hold messages that a search has found; return those to hand over."""
        assert self.window is not None
        handed: list[HeldMessage] = []
        for row in rows:
            held = HeldMessage(row, self, self.window, now, is_ahead=True)
            if not (
                self.must_wait(row) or self._is_behind(held) or self._is_known(row)
            ):
                self.held[row.identity] = held
                handed.append(held)
        return handed

    def must_wait(self, row: ClaimedMessage) -> bool:
        """Whether a message that the log doesn't have waits for another of its key."""
        return row.waiting is None and self.is_closed(row.key)

    def is_closed(self, key: str | None) -> bool:
        """Whether a message of a key waits, or its refusal has to be settled."""
        return (
            key is not None
            and bool(self.must_settle or self._ended_ahead or self.keys.blocked)
            and (
                self.keys.is_blocked(key)
                or key in self._closed()
                or key in self.closed_ahead
            )
        )

    def _is_known(self, row: ClaimedMessage) -> bool:
        return row.identity in self.held or row.identity in self._ended_ahead

    def _reach(self, row: ClaimedMessage, now: float) -> bool:
        """Record that a claim has read a message; return whether it was ahead."""
        held = self.held.get(row.identity)
        if held is not None and held.is_ahead:
            held.row, held.is_ahead = row, False
            return True
        known = self._ended_ahead.pop(row.identity, None)
        if known is None:
            return False
        held, decided = known
        held.row, held.is_ahead = row, False
        if decided is PUBLISHED:
            self._unsettled.ended.append(known)
        else:
            self._wait(now)
            self._unsettled.refused.append(known)
        return True

    def _closed(self) -> set[str | None]:
        """Return the keys of which a message waits that the log doesn't have yet."""
        keys = {held.row.key for held, _ in self._unsettled.refused}
        return (keys | {row.key for row, _ in self._unsettled.withheld}) - {None}

    def _is_behind(self, held: HeldMessage) -> bool:
        """Whether it, or an earlier message of its key, runs since another window."""
        return bool(self.stale) and (
            held.row.identity in self.stale
            or held.row.key in {it.row.key for it in self.stale.values()} - {None}
        )

    def let_go(self, held: HeldMessage) -> list[HeldMessage]:
        """Hold a message no longer; return those to hand over that were behind it."""
        identity = held.row.identity
        if self.held.get(identity) is held:
            del self.held[identity]
        if self.stale.get(identity) is not held:
            return []
        del self.stale[identity]
        following = [it for it in self._behind if not self._is_behind(it)]
        self._behind = [it for it in self._behind if it not in following]
        return following

    def _claimed(self, places: Iterable[Place], extent: Extent) -> None:
        if self.window is not None:
            (snapshot, next_xid, *_), is_cut = extent.view, extent.is_cut
            self.window.claimed(places, extent.up_to, snapshot, next_xid, is_cut=is_cut)

    def _wait(self, now: float) -> None:
        """Let what has to be logged wait for handlers, from now on."""
        if not self.must_settle:
            self.log_by = now + _PATIENCE

    def end(self, held: HeldMessage, answer: Confirmation, now: float) -> None:
        """Record how a handler has ended."""
        held.is_open = False
        if isinstance(answer, Acked):
            if held.is_ahead:
                self._end_ahead(held, PUBLISHED)
            else:
                self._unsettled.ended.append((held, PUBLISHED))
            return
        assert answer.retry_after is not None
        delay = answer.retry_after.total_seconds()
        cause = "refused" if answer.is_attempt else "postponed"
        decided = Disposition(cause, answer.reason, delay, charge=answer.is_attempt)
        if held.is_ahead:
            self._end_ahead(held, decided)
            return
        self._wait(now)
        self._unsettled.refused.append((held, decided))

    def _end_ahead(self, held: HeldMessage, decided: Disposition) -> None:
        del self.held[held.row.identity]
        self._ended_ahead[held.row.identity] = held, decided

    def give_back(self, held: HeldMessage, now: float) -> bool:
        """Take a message back that was not started; return whether it can start again.

        Otherwise the log has it, or gets it, or a claim finds it.
        """
        row = held.row
        if row.waiting is None and not self.must_wait(row):
            return True
        if held.is_ahead:
            self.let_go(held)
            return False
        if row.waiting is None:
            decided = BLOCKED
            self._to_drain.add(row.key)
        else:
            is_known = row.waiting.entry != _NO_NUMBER
            decided = UNTOUCHED if is_known else UNKNOWN
        held.is_open = False
        self._wait(now)
        # A claim or a settlement may be on its way. Later ones of its key wait so long.
        self._unsettled.refused.append((held, decided))
        return False

    def settle(self, now: float, *, is_leaving: bool) -> LaneSettlement | None:
        """Return what to store now; None if the lane must be taken over first."""
        window = self.window
        if window is None:
            return None
        ended, refused, withheld = self._unsettled
        taken = _Unsettled(ended[:], refused[:], withheld[:])
        decided = [(held.row, it) for held, it in (*taken.ended, *taken.refused)]
        decided += taken.withheld
        for held, _ in taken.ended:
            if held.row.waiting is None:
                window.ended(held.place)
        others = [one for one in decided if one[0].waiting is not None]
        new = [one for one in decided if one[0].waiting is None]
        log = [one for one in new if one[1] is not PUBLISHED]
        log.sort(key=lambda one: place_of(one[0]))
        running = self._running()
        before = [it for it in running if log and it.place < place_of(log[-1][0])]
        must_wait = bool(before) and now < self.log_by and not is_leaving
        if must_wait:
            log = []
        opened = before if log else self._long_open(running, now, all=is_leaving)
        result = self._pass(log, opened)
        if result is None and log:
            # While late rows are read, a position has to pass all that was claimed.
            opened = running
            result = self._pass(log, opened)
            must_wait = self.needs_claim = result is None
        kept = _Unsettled.none()
        if must_wait:
            kept.refused.extend(it for it in taken.refused if it[0].row.waiting is None)
            kept.withheld.extend(it for it in taken.withheld if it[0].waiting is None)
        advance = None
        if result is None:
            log, opened = [], []
        else:
            after, stored, covered = result
            moments = [row.created_at for row, _ in log]
            moments += [it.created_at for it in opened]
            deferred = Counter(filter(None, map(window.read.day_of, moments)))
            advance = Advance(self, after, stored, covered, deferred)
        others += [*log, *((it.row, OPEN) for it in opened)]
        published = sum(it is PUBLISHED for _, it in new)
        return LaneSettlement(advance, published, others, log, opened, taken, kept)

    def stored(self, settlement: LaneSettlement) -> None:
        """Record that it was stored."""
        taken, kept, opened = settlement.taken, settlement.kept, settlement.opened
        if settlement.advance is not None:
            assert self.window is not None
            places = [place_of(row) for row, _ in settlement.log]
            places += [it.place for it in opened]
            self.window.settled(settlement.advance.after, places)
            self._moves = False
        now = self._unsettled
        self._unsettled = _Unsettled(
            now.ended[len(taken.ended) :],
            [*kept.refused, *now.refused[len(taken.refused) :]],
            [*kept.withheld, *now.withheld[len(taken.withheld) :]],
        )
        for held in opened:
            held.opened()
        if not self.must_settle:
            for key in self._to_drain:
                if key is not None:
                    self.keys.drain(key)
            self._to_drain.clear()
        left = {id(held) for held, _ in kept.refused}
        for held, _ in (*taken.ended, *taken.refused):
            if id(held) not in left:
                self.let_go(held)
        for held, _ in taken.ended:
            key = held.row.key
            if held.row.waiting is not None and key and key not in self.keys.draining:
                # A refresh may have blocked it because of the entry "open".
                self.keys.drain(key)

    def _pass(
        self, log: Sequence[Decided], opened: Sequence[HeldMessage]
    ) -> tuple[Progress, list[Stored], Counter[Day]] | None:
        assert self.window is not None
        places = [place_of(row) for row, _ in log] + [it.place for it in opened]
        return self.window.settle(places, all_days=self.must_move)

    def _running(self) -> list[HeldMessage]:
        """Return the messages in the window whose handlers have not ended, in order."""
        running = [
            it
            for it in self.held.values()
            if it.is_open and it.row.waiting is None and not it.is_ahead
        ]
        return sorted(running, key=attrgetter("place"))

    def _long_open(
        self, running: Sequence[HeldMessage], now: float, *, all: bool
    ) -> list[HeldMessage]:
        """Return the messages that get an entry, as others have ended behind them.

        Args:
            all: whether it doesn't matter for how long and how many.
        """
        window = self.window
        assert window is not None
        found: list[HeldMessage] = []
        passed = {*window.passed_by} if running else ()
        for held in running:
            if held.place not in passed or not (
                all
                or held.since <= now - OPEN_AFTER
                or (not found and window.count_behind(held.place) >= MOST_AGAIN)
            ):
                break
            found.append(held)
        return found


def place_of(row: ClaimedMessage) -> Place:
    """Return the place of a message in a window."""
    return row.seq, row.created_at
