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
them. Each gets its entry in the log when it ends, in a settlement of its lane, and so
do earlier ones of its key in hand if it has to wait. A claim that reaches a message
that the log has leaves it to the log; the position that covers it counts it.

`tests/models/direct.py` explores the rule for entries over all interleavings.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from operator import attrgetter
from typing import Final

from typing_extensions import override

from pillarbox.inbox.sources.postgres.held_message import NO_NUMBER, HeldMessage, Keeper
from pillarbox.inbox.sources.postgres.settlement import LaneSettlement, Unsettled
from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.lane import LANES
from pillarbox.outbox.log.lanes.batch import (
    BLOCKED,
    PUBLISHED,
    UNKNOWN,
    UNTOUCHED,
    ClaimedMessage,
    Disposition,
)
from pillarbox.outbox.log.lanes.lane import Advance, Extent, Lane
from pillarbox.outbox.log.progress import Day, Progress, Stored
from pillarbox.outbox.log.settle import Decided
from pillarbox.outbox.log.takeover import SKEW
from pillarbox.outbox.log.window import Place, Window

OPEN: Final = Disposition("open", delay=0)
"""Its handler runs."""
OPEN_AFTER: Final = 60.0
"""Seconds after which a message gets an entry, if others have ended behind it."""
MOST_AGAIN: Final = 4096 // LANES
"""The most that can end behind one without an entry: a kill repeats them."""
_PATIENCE: Final = 0.05
"""Seconds that a settlement waits for handlers, rather than give them entries."""
_MOST_TENANTS: Final = 64
"""For others, a search starts at the claims, and skips messages in the log."""


class WindowLane(Lane):
    """One leased lane. Only its own methods change it.

    Args:
        stale: its messages in hand that were claimed in a window that has ended.
        keeper: who gets and settles its messages.

    Attributes:
        window: how far it is read, and how far that is stored; None: it must be taken
            over.
        held: its messages in hand, by their identities.
        found_up_to: a seq of each tenant up to which searches have found its messages.
        log_by: when a settlement waits for handlers no longer, as `time.monotonic()`.
        needs_claim: what must be settled has to wait until late rows are read.
    """

    __slots__ = (
        "_behind",
        "_moves",
        "_to_drain",
        "_unsettled",
        "found_up_to",
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
        self._unsettled = Unsettled.none()
        self.window: Window | None = None
        self.found_up_to: BoundedDict[str, int] = BoundedDict(_MOST_TENANTS)
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
            self.found_up_to.clear()

    @override
    def move_fence(self, day: Day) -> None:
        """Do nothing: handlers run, and a settlement moves it."""

    @override
    def advance(self, extent: Extent) -> None:
        (snapshot, next_xid, *_), is_cut = extent.view, extent.is_cut
        if self.window is not None and (extent.up_to >= 0 or not is_cut):
            self.window.claimed((), extent.up_to, snapshot, next_xid, is_cut=is_cut)

    @override
    def settled(self, after: Progress, at: float) -> None:
        self.known_at = at
        self.skipped = 0

    @property
    def is_used(self) -> bool:
        """Whether some of its messages are in hand."""
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
        logged: Collection[Hashable] = (),
    ) -> list[HeldMessage]:
        """Record a claim; return the messages to hand over.

        Args:
            rows: those that may be handled.
            extent: how far it has read the lane, if it has found messages there.
            now: the time, as `time.monotonic()`.
            logged: the identities of new ones that the log has, as they were ahead.
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
            (snapshot, next_xid, *_), is_cut = extent.view, extent.is_cut
            places = map(place_of, new)
            up_to = extent.up_to
            self.window.claimed(places, up_to, snapshot, next_xid, is_cut=is_cut)
            ahead = {row.identity for row in new if self._reach(row, logged)}
            rows = [row for row in rows if row.identity not in ahead or row.waiting]
            withheld = [it for it in withheld if it[0].identity not in ahead]
            self._moves = self._moves or len(ahead) == len(new)
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
                handed += self._hold(HeldMessage(row, self, self.window, now))
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

    def take_ahead(
        self, rows: Iterable[ClaimedMessage], floor: int, now: float
    ) -> list[HeldMessage]:
        """Record what a search has found; return the messages to hand over.

        Args:
            rows: those of each tenant in order.
            floor: a seq below all rows that may still commit.
        """
        assert self.window is not None
        handed: list[HeldMessage] = []
        for row in rows:
            if row.message is not None and row.message.tenant is not None:
                self.found_up_to[row.message.tenant] = min(row.seq, floor)
            if row.identity in self.held:
                continue
            held = HeldMessage(row, self, self.window, now, is_ahead=True)
            if self.must_wait(row.key):
                self.held[row.identity] = held
                self._block(held, now)
            else:
                handed += self._hold(held)
        return handed

    def _hold(self, held: HeldMessage) -> list[HeldMessage]:
        self.held[held.row.identity] = held
        if not self._is_behind(held):
            return [held]
        self._behind.append(held)
        return []

    def _reach(self, row: ClaimedMessage, logged: Collection[Hashable]) -> bool:
        """Record that a claim has read a message; return whether it was ahead."""
        assert self.window is not None
        held = self.held.get(row.identity)
        if row.identity in logged or (held and held.row.waiting is not None):
            self.window.logged(place_of(row))
        elif held is not None and held.is_ahead:
            held.is_ahead = False
        else:
            return False
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

    def _wait(self, now: float) -> None:
        """Let what has to be logged wait for handlers, from now on."""
        if not self.must_settle:
            self.log_by = now + _PATIENCE

    def end(self, held: HeldMessage, outcome: Disposition, now: float) -> None:
        """Record how a handler has ended."""
        if outcome is PUBLISHED:
            held.is_open = False
            self._unsettled.ended.append((held, PUBLISHED))
        else:
            self._refuse(held, outcome, now)

    def give_back(self, held: HeldMessage, now: float) -> bool:
        """Take a message back that was not started; return whether it can start again.

        Otherwise the log has it, or gets it.
        """
        row = held.row
        if row.waiting is None and not self.must_wait(row.key):
            return True
        if row.waiting is None:
            self._block(held, now)
            return False
        is_known = row.waiting.entry != NO_NUMBER
        self._refuse(held, UNTOUCHED if is_known else UNKNOWN, now)
        return False

    def _block(self, held: HeldMessage, now: float) -> None:
        self._to_drain.add(held.row.key)
        self._refuse(held, BLOCKED, now)

    def _refuse(self, held: HeldMessage, decided: Disposition, now: float) -> None:
        held.is_open = False
        self._wait(now)
        # A claim or a settlement may be on its way. Later ones of its key wait for it.
        self._unsettled.refused.append((held, decided))

    def must_wait(self, key: str | None) -> bool:
        """Return whether the messages of a key that were not started have to wait."""
        return key is not None and (key in self._closed() or self.keys.is_blocked(key))

    def settle(self, now: float, *, is_leaving: bool) -> LaneSettlement | None:
        """Return what to store now; None if the lane must be taken over first."""
        window = self.window
        if window is None:
            return None
        ended, refused, withheld = self._unsettled
        taken = Unsettled(ended[:], refused[:], withheld[:])
        told = [*taken.ended, *taken.refused]
        decided = [(held.row, it) for held, it in told if not held.is_ahead]
        decided += taken.withheld
        for held, _ in taken.ended:
            if held.row.waiting is None and not held.is_ahead:
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
        ahead = [(held.row, it) for held, it in told if held.is_ahead]
        ahead = [one for one in ahead if one[1] is PUBLISHED or not must_wait]
        opened = before if log else self._long_open(running, now, all=is_leaving)
        all_days = self.must_move or bool(ahead)
        result = self._pass(log, opened, all_days=all_days)
        if result is None and (log or ahead):
            # While late rows are read, a position has to pass all that was claimed.
            opened = running
            result = self._pass(log, opened, all_days=all_days)
            self.needs_claim = result is None
            must_wait = must_wait or result is None
        kept = Unsettled.none()
        if must_wait:
            kept.refused.extend(it for it in taken.refused if it[0].row.waiting is None)
            kept.withheld.extend(it for it in taken.withheld if it[0].waiting is None)
        advance: Advance | None = None
        if result is None:
            log, ahead, opened = [], [], []
            kept.ended.extend(it for it in taken.ended if it[0].is_ahead)
        else:
            after, stored, covered = result
            deferred = window.deferred(_places(log, opened))
            advance = Advance(self, after, stored, covered, deferred)
        earlier = self._earlier(ahead, opened)
        others += [*log, *ahead, *((it.row, OPEN) for it in (*opened, *earlier))]
        published = sum(it is PUBLISHED for _, it in new)
        return LaneSettlement(
            advance, published, others, log, opened, earlier, taken, kept
        )

    def stored(self, settlement: LaneSettlement) -> None:
        """Record that it was stored."""
        taken, kept, opened = settlement.taken, settlement.kept, settlement.opened
        if settlement.advance is not None:
            assert self.window is not None
            places = _places(settlement.log, opened)
            self.window.settled(settlement.advance.after, places)
            for held in settlement.earlier:
                self.window.logged(held.place)
            self._moves = False
        now = self._unsettled
        self._unsettled = Unsettled(
            [*kept.ended, *now.ended[len(taken.ended) :]],
            [*kept.refused, *now.refused[len(taken.refused) :]],
            [*kept.withheld, *now.withheld[len(taken.withheld) :]],
        )
        for held in (*opened, *settlement.earlier):
            held.opened()
        for row, _ in settlement.others:
            self.keys.logged(row.seq)
        if not self.must_settle:
            for key in self._to_drain:
                if key is not None:
                    self.keys.drain(key)
            self._to_drain.clear()
        left = {id(held) for held, _ in (*kept.ended, *kept.refused)}
        for held, _ in (*taken.ended, *taken.refused):
            if id(held) not in left:
                self.let_go(held)
        for held, _ in taken.ended:
            key = held.row.key
            if held.row.waiting is not None and key and key not in self.keys.draining:
                # A refresh may have blocked it because of the entry "open".
                self.keys.drain(key)

    def _pass(
        self, log: Sequence[Decided], opened: Sequence[HeldMessage], *, all_days: bool
    ) -> tuple[Progress, list[Stored], Counter[Day]] | None:
        assert self.window is not None
        return self.window.settle(_places(log, opened), all_days=all_days)

    def _earlier(
        self, ahead: Sequence[Decided], opened: Sequence[HeldMessage]
    ) -> list[HeldMessage]:
        """Return the messages in hand that precede one ahead of their key that waits.

        Without entries, they would be claimed after it, by who takes the lane over.
        """
        last = {row.key: row.seq for row, it in ahead if it is not PUBLISHED}
        return [
            it
            for it in (self.held.values() if last else ())
            if it.is_open and it.row.waiting is None and it not in opened
            if it.row.key is not None and it.row.seq < last.get(it.row.key, -1)
        ]

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


def _places(log: Sequence[Decided], opened: Sequence[HeldMessage]) -> list[Place]:
    return [place_of(row) for row, _ in log] + [it.place for it in opened]
