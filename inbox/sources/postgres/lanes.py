"""What a replica knows about the lanes that it leases from the postgres broker.

Claiming writes nothing. The claims of a lane read each message once, in order of seq,
and from then on this module tracks its state. It is *held* (claimed, with no outcome
written yet), acked, or it *waits*: it was nacked with a delay, or it arrived while
another delivery of its key waited and thereby *blocked* the key. The positions and the
log in the database record the same, so that the lane's next owner finds what is left.

A position covers what has ended; `outbox/log/window.py` describes how it advances.
Deliveries *ahead* are known although no claim has reached them: a look at their tenant
has found them, or the log has an entry for them. What ends ahead gets an entry, and
claims skip it. Deliveries that wait are claimed by their place, once they are due. When
a nacked delivery becomes due, its key *drains*: its deliveries are read from the log in
order of seq, and until none is left, deliveries of the key that a claim finds go behind
them.
"""

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Final, NamedTuple

from typing_extensions import override

from inbox.poison.history import Takeover
from inbox.sources.postgres.ready import Ready
from outbox.log.lane import Extent, LogLane
from outbox.log.progress import Progress
from outbox.log.window import MOST_AGAIN, Place, Window
from outbox.message import Message

# A draining key may be in a lane that is about to be released, so it isn't read
# immediately.
_SOON: Final = 0.05


class ClaimedDelivery(NamedTuple):
    """A delivery as it was read, and the problem with its row, if there is one."""

    lane: int
    seq: int
    created_at: datetime
    attempts: int
    message: Message
    problem: str | None
    is_logged: bool = False
    """Whether the log has an entry for it; if so, its ack goes there, too."""

    @property
    def place(self) -> Place:
        """What identifies it."""
        return self.seq, self.created_at


class FreedKey(NamedTuple):
    """A draining key: its deliveries above this seq are next."""

    lane: int
    key: str
    above: int


class _Due(NamedTuple):
    """When a waiting delivery is due, by the monotonic clock."""

    at: float
    lane: int
    place: Place
    key: str | None


class _Held(NamedTuple):
    """A delivery in hand, and since when."""

    row: ClaimedDelivery
    since: float


def _is_of(lane: int, key: str, row: ClaimedDelivery) -> bool:
    return row.lane == lane and row.message.key == key


@dataclass(slots=True)
class _Key:
    """A key that is blocked or draining."""

    above: int
    """Its waiting deliveries at or below this seq have been claimed."""
    due: dict[Place, float] = field(default_factory=dict)
    """The deliveries that block it, and when each is due; inf: not written yet."""


class DeliveryLane(LogLane):
    """One leased lane.

    Attributes:
        window: how far it is read and how far that is stored; None: it must be taken
            over.
        has_moved: rows were read since the positions of all days were stored.
        takeover: since when it was taken over; None: it wasn't yet.
        ahead: the places of deliveries that claims skip.
        keys: those that are blocked or draining.
        alone: the deliveries that wait without blocking a key, and when each is due.
    """

    __slots__ = ("ahead", "alone", "has_moved", "keys", "takeover", "window")

    def __init__(self, number: int) -> None:
        self.forget()
        self.takeover: Takeover | None = None
        self.keys: dict[str, _Key] = {}
        super().__init__(number)

    def forget(self) -> None:
        """Forget how far it is read, and what waits in it."""
        self.window: Window | None = None
        self.has_moved = False
        self.ahead: set[Place] = set()
        self.alone: dict[Place, float] = {}

    @property  # type: ignore[explicit-override]
    @override
    def progress(self) -> Progress | None:
        """How far claims have read."""
        return None if self.window is None else self.window.read

    @progress.setter
    def progress(self, progress: Progress | None) -> None:
        if progress is None:
            self.window = None
        else:
            assert self.window is not None
            self.window.read = progress

    @override
    def continue_with(self, progress: Progress) -> None:
        if self.window is None or self.window.stored.number != progress.number:
            self.window = Window(progress)
        else:
            self.window.read_days(progress)

    @property
    def start(self) -> int:
        """The seq above which the next claim reads."""
        assert self.window is not None
        return min(part.start for part in self.window.read.parts())

    def must_move(self, long_past: datetime) -> bool:
        """Whether to store the positions of all days.

        The last ones must not be of a day that ended by `long_past`: claims read it.
        """
        if self.window is None:
            return False
        stored = self.window.stored
        return self.has_moved or (
            stored.number > 0 and max(stored.fence).ends_at < long_past
        )

    @property
    def up_to(self) -> int:
        """The seq above which nothing is covered or claimed in order."""
        assert self.window is not None
        return max(position.up_to for _, position in self.window.read.days)


class DeliveryLanes:
    """The lanes of this replica. Pure bookkeeping, for one event loop.

    Args:
        on_use, on_leave: called with a lane when its first delivery becomes held, and
            when its last one is let go.
        clock: the clock for all times here.

    Attributes:
        ready: the deliveries that were claimed but not handed out yet.
    """

    def __init__(
        self,
        on_use: Callable[[int], None],
        on_leave: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_use = on_use
        self._on_leave = on_leave
        self._clock = clock
        self._lanes: dict[int, DeliveryLane] = {}
        self._held: dict[Place, _Held] = {}
        self._count: Counter[int] = Counter()
        self.ready: Ready[ClaimedDelivery] = Ready()
        self._first = 0
        self._due: list[_Due] = []
        self._draining: dict[tuple[int, str], None] = {}
        self._behind: list[ClaimedDelivery] = []
        self._logged: set[Place] = set()
        self._stale: set[Place] = set()

    @property
    def new(self) -> list[int]:
        """The lanes that were leased but haven't been read yet."""
        return [number for number, lane in self._lanes.items() if lane.window is None]

    @property
    def next_due(self) -> float:
        """When the next waiting delivery is due; inf if none waits."""
        if self._draining:
            return self._clock() + _SOON
        return self._due[0].at if self._due else math.inf

    @property
    def waiting(self) -> int:
        """About how many deliveries wait, each of which takes memory."""
        return len(self._due)

    @property
    def held(self) -> Collection[Place]:
        """The places of the deliveries that are held."""
        return self._held.keys()

    def take(self, lanes: Collection[int]) -> None:
        """Add lanes that were just leased."""
        for number in lanes:
            self._lanes[number] = DeliveryLane(number)

    def find(self, number: int) -> DeliveryLane | None:
        """Return a lane, or None if it is not leased."""
        return self._lanes.get(number)

    def lose(self, lanes: Collection[int]) -> None:
        """Forget lanes whose lease was lost; handed-out deliveries stay held."""
        self._drop(lanes)
        for number in lanes:
            self._lanes.pop(number, None)

    def doubt(self, lanes: Collection[int] | None = None) -> None:
        """Forget how far lanes are read, and what waits; None: all of them.

        Keys of which a delivery was nacked stay blocked until that is written.
        """
        for number in self._drop(self._lanes.keys() if lanes is None else lanes):
            lane = self._lanes[number]
            lane.forget()
            lane.keys = {
                key: known
                for key, known in lane.keys.items()
                if math.inf in known.due.values()
            }

    def lose_session(self) -> None:
        """Doubt all lanes; what was handed out is stale.

        The server may have lost it, or what its handler has committed.
        """
        self.doubt()
        self._stale = set(self._held)

    def _drop(self, lanes: Collection[int]) -> list[int]:
        for row in self.ready.remove(lambda row: row.lane in lanes):
            self.let_go(row)
        self._behind = [row for row in self._behind if row.lane not in lanes]
        return [number for number in lanes if number in self._lanes]

    def in_turn(self, leased: Collection[int]) -> list[DeliveryLane]:
        """Return the lanes to claim from; lanes take turns."""
        ours = sorted(
            number
            for number in leased
            if (lane := self._lanes.get(number)) is not None and lane.window is not None
        )
        start = next((i for i, n in enumerate(ours) if n >= self._first), 0)
        return [self._lanes[number] for number in ours[start:] + ours[:start]]

    def claimed(
        self, lane: DeliveryLane, rows: Sequence[ClaimedDelivery], read: Extent
    ) -> None:
        """Hold the rows claimed from a lane, in this order."""
        if self._lanes.get(lane.number) is not lane or lane.window is None:
            return  # lost in the meantime
        up_to = read.up_to if read.is_cut else max(read.up_to, lane.up_to)
        passed = {place for place in lane.ahead if place[0] <= up_to}
        if passed:
            others = {row.place for row in self._behind}
            passed_by = [p for p in passed if p in others or self._is_unlogged(p)]
        else:
            passed_by = []
        # Until the late rows are read, a claim may not see one that is ahead.
        if lane.window.read.as_of is None:
            lane.ahead -= passed
        places = [*(row.place for row in rows), *passed_by]
        view = read.view
        lane.window.claimed(
            places, read.up_to, view.snapshot, view.next_xid, is_cut=read.is_cut
        )
        lane.has_moved = lane.has_moved or read.up_to >= 0
        for row in rows:
            self._put(lane, row)
        if rows:
            self._first = lane.number + 1

    def claimed_ahead(self, rows: Iterable[ClaimedDelivery]) -> None:
        """Hold rows that a look at their tenants has claimed."""
        for row in rows:
            lane = self._lanes.get(row.lane)
            if lane is not None and lane.reads(row.created_at):
                lane.ahead.add(row.place)
                self._put(lane, row)

    def claimed_again(self, row: ClaimedDelivery) -> None:
        """Hold a delivery that waited without blocking its key."""
        lane = self._lanes.get(row.lane)
        if lane is not None:
            self._put(lane, row)

    def _put(self, lane: DeliveryLane, row: ClaimedDelivery) -> None:
        if row.place in self._held:
            return
        if row.message.key in lane.keys:
            self._put_behind(lane, row)
        else:
            self._make_ready(row)

    def freed(
        self, leased: Collection[int], max_keys: int, max_places: int
    ) -> tuple[list[FreedKey], dict[Place, int]]:
        """Return the draining keys of these lanes, and the places that are due."""
        now = self._clock()
        places: dict[Place, int] = {}
        while self._due and self._due[0].at <= now and len(places) < max_places:
            due = heapq.heappop(self._due)
            lane = self._lanes.get(due.lane)
            if lane is None:
                continue
            if due.key is not None:
                self._draining[due.lane, due.key] = None
            elif lane.alone.get(due.place, math.inf) <= now:
                del lane.alone[due.place]
                places[due.place] = due.lane
        keys: list[FreedKey] = []
        for number, key in list(self._draining):
            lane = self._lanes.get(number)
            known = None if lane is None else lane.keys.get(key)
            if known is None or any(at > now for at in known.due.values()):
                del self._draining[number, key]
            elif number in leased and len(keys) < max_keys:
                keys.append(FreedKey(number, key, known.above))
        for place, number in list(places.items()):
            if number not in leased:
                self.wait(number, place, None, now)
                del places[place]
        return keys, places

    def claimed_waiting(
        self,
        keys: Sequence[FreedKey],
        rows: Sequence[ClaimedDelivery | None],
        *,
        since: float,
        held: Collection[Place],
        max_rows_each: int,
    ) -> None:
        """Hold the rows claimed for draining keys; free a key that has no more rows.

        Args:
            keys: the keys that were requested.
            rows: the rows found, those of each key in order of seq; None if there was
                no room for the rest.
            since: when they were requested.
            held: the places held at that time; their outcomes may have been written in
                the meantime.
            max_rows_each: how many rows of each key were requested.
        """
        found: dict[tuple[int, str | None], list[ClaimedDelivery]] = {}
        for row in rows:
            if row is not None:
                found.setdefault((row.lane, row.message.key), []).append(row)
        cut = None in rows
        for number, key, _ in keys:
            lane = self._lanes.get(number)
            known = None if lane is None else lane.keys.get(key)
            if lane is None or known is None:
                continue
            known.due = {place: at for place, at in known.due.items() if at > since}
            if known.due:
                continue  # nacked in the meantime: the key is blocked again
            of_key = found.get((number, key), [])
            # These include deliveries given back in the meantime, in order.
            later = self.ready.remove(partial(_is_of, number, key))
            for row in of_key:
                known.above = row.seq
                if row.place not in held and row.place not in self._held:
                    self._hold(row)
                    later.append(row)
            for row in sorted(later, key=lambda row: row.seq):
                self.ready.add(row)
            if len(of_key) < max_rows_each and not cut:
                del lane.keys[key]
                self._draining.pop((number, key), None)

    def hand_out(
        self, limit: int, leased: Collection[int], without: Collection[str] = ()
    ) -> list[ClaimedDelivery]:
        """Return at most `limit` claimed deliveries of lanes that are still leased.

        Tenants take turns, except those in `without`. So the order of a key holds only
        if all its messages belong to one tenant.
        """
        leaving = self.ready.remove(lambda row: row.lane not in leased)
        for row in leaving:
            self.let_go(row)
        # If such a lane stays, it is taken over again.
        self.doubt({row.lane for row in leaving})
        for row in self.ready.remove(self._is_blocked):
            self._release(row)
            self._put_behind(self._lanes[row.lane], row)
        return self.ready.take(limit, without)

    def block(self, row: ClaimedDelivery) -> None:
        """Hold back the rest of a delivery's key until that delivery is retried."""
        lane = self._lanes.get(row.lane)
        if lane is not None and row.message.key is not None:
            self._key(lane, row.message.key, row.seq).due[row.place] = math.inf

    def wait(self, number: int, place: Place, key: str | None, due: float) -> None:
        """Record when to claim a delivery that has an entry in the log, unless held."""
        lane = self._lanes.get(number)
        if lane is None or place in self._held:
            return
        if key is None:
            lane.alone[place] = due
        else:
            self._key(lane, key, place[0]).due[place] = due
        heapq.heappush(self._due, _Due(due, number, place, key))

    def found_behind(self, number: int, key: str) -> None:
        """Drain a key whose waiting deliveries don't block it."""
        lane = self._lanes.get(number)
        if lane is not None:
            self._key(lane, key, 0)
            self._draining[number, key] = None

    def give_back(self, row: ClaimedDelivery) -> None:
        """Make a delivery ready again, ahead of the rest of its key."""
        if row.lane not in self._lanes:
            self.let_go(row)  # for the lane's next owner
        elif row.place in self._stale:
            self.let_go(row)
            self.doubt([row.lane])
        elif row.place in self._held:
            key = row.message.key
            self.ready.put_back(
                row,
                lambda other: (
                    key is not None and other.message.key == key and other.seq < row.seq
                ),
            )

    def let_go(self, row: ClaimedDelivery) -> None:
        """Stop holding a delivery: its outcome is written, or it has no outcome."""
        self._release(row)
        self._logged.discard(row.place)
        self._stale.discard(row.place)

    def is_stale(self, row: ClaimedDelivery) -> bool:
        """Return whether a delivery was handed out in a session that is lost."""
        return row.place in self._stale

    @property
    def has_behind(self) -> bool:
        """Whether deliveries wait behind their key that aren't logged."""
        return bool(self._behind)

    def to_log(self, limit: int) -> tuple[list[ClaimedDelivery], list[ClaimedDelivery]]:
        """Return deliveries that wait behind their key but aren't logged.

        And those held ahead of them that aren't logged either: without an entry, the
        lane's next owner would deliver them after what waits behind them.
        """
        behind = sorted(self._behind, key=lambda row: row.place)[:limit]
        last = {(row.lane, row.message.key): row.place for row in behind}
        ahead = [
            row
            for row, _ in self._held.values()
            if (place := last.get((row.lane, row.message.key))) is not None
            and row.place < place
            and not self.is_logged(row)
        ]
        return behind, ahead

    def is_logged(self, row: ClaimedDelivery) -> bool:
        """Return whether the ack of a delivery goes to the log."""
        return row.is_logged or row.place in self._logged

    def to_open(self, lane: DeliveryLane, before: float) -> list[ClaimedDelivery]:
        """Return deliveries that need an entry, so that a position can pass them.

        That is, those behind which others have ended, if these are many, or if it is
        held since `before`.
        """
        found: list[ClaimedDelivery] = []
        if lane.window is not None:
            for place in lane.window.passed_by:
                held = self._held.get(place)
                if held is None or not (
                    held.since <= before
                    or (not found and lane.window.count_behind(place) >= MOST_AGAIN)
                ):
                    break
                found.append(held.row)
        return found

    def opened(self, rows: Iterable[ClaimedDelivery]) -> None:
        """Record that deliveries have entries in the log, so their acks go there."""
        self._logged.update(row.place for row in rows)

    def logged(self, rows: Collection[ClaimedDelivery]) -> None:
        """Record that deliveries have entries: claims skip them."""
        places = {row.place for row in rows}
        self._behind = [row for row in self._behind if row.place not in places]
        for row in rows:
            lane = self._lanes.get(row.lane)
            if lane is None or lane.window is None or self.is_logged(row):
                continue
            if row.place in lane.window:
                lane.window.ended(row.place)
            else:
                lane.ahead.add(row.place)

    def _is_unlogged(self, place: Place) -> bool:
        held = self._held.get(place)
        return held is not None and not self.is_logged(held.row)

    def _make_ready(self, row: ClaimedDelivery) -> None:
        self._hold(row)
        self.ready.add(row)

    def _hold(self, row: ClaimedDelivery) -> None:
        self._held[row.place] = _Held(row, self._clock())
        self._count[row.lane] += 1
        if self._count[row.lane] == 1:
            self._on_use(row.lane)

    def _release(self, row: ClaimedDelivery) -> None:
        if self._held.pop(row.place, None) is None:
            return
        self._count[row.lane] -= 1
        if not self._count[row.lane]:
            self._on_leave(row.lane)

    def _put_behind(self, lane: DeliveryLane, row: ClaimedDelivery) -> None:
        assert row.message.key is not None
        self._key(lane, row.message.key, row.seq)
        if not self.is_logged(row):
            self._behind.append(row)

    def _key(self, lane: DeliveryLane, key: str, seq: int) -> _Key:
        """Block a key if it isn't; its waiting deliveries from `seq` on are next."""
        known = lane.keys.setdefault(key, _Key(above=seq - 1))
        known.above = min(known.above, seq - 1)
        return known

    def _is_blocked(self, row: ClaimedDelivery) -> bool:
        lane, key = self._lanes.get(row.lane), row.message.key
        if lane is None or key is None or key not in lane.keys:
            return False
        return bool(lane.keys[key].due)
