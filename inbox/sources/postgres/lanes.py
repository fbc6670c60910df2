"""What a replica knows about the lanes that it leases from the postgres broker.

Claiming writes nothing. The claims of a lane read each delivery once, in order of seq,
and from then on this module tracks its state. It is *held* (claimed, with no outcome
written yet), acked, or it *waits*: it was nacked with a delay, or it arrived while
another delivery of its key waited and thereby *blocked* the key. The marks and the log
in the database record the same, so that the lane's next owner finds what is left.

Claims start above a lane's *floor* and skip the deliveries above it that they have
*passed*. `outbox/postgres/lane_cursor.py` describes how the floor rises. Deliveries
that wait are instead claimed by their place, once they are due. When a nacked delivery
becomes due, its key *drains*: its deliveries are read from the log in order of seq, and
until none is left, deliveries of the key that a claim finds go behind them.
"""

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple

from inbox.sources.postgres.ready import Ready
from outbox.message import Message
from outbox.postgres.lane_cursor import LaneCursor, Snapshot

BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)
# One statement draws seq and created_at, but not at the same instant.
SKEW: Final = timedelta(hours=1)
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


class WaitingDelivery(NamedTuple):
    """A waiting delivery, and where to find it."""

    lane: int
    seq: int
    created_at: datetime
    attempts: int
    is_logged: bool


class FreedKey(NamedTuple):
    """A draining key: its deliveries above this seq are next."""

    lane: int
    key: str
    above: int


class _Due(NamedTuple):
    """When a waiting delivery is due, by the monotonic clock."""

    at: float
    lane: int
    seq: int
    key: str | None


def _is_of(lane: int, key: str, row: ClaimedDelivery) -> bool:
    return row.lane == lane and row.message.key == key


@dataclass(slots=True)
class _Key:
    """A key that is blocked or draining."""

    above: int
    """Its waiting deliveries at or below this seq have been claimed."""
    due: dict[int, float] = field(default_factory=dict)
    """The deliveries that block it, and when each is due; inf: not written yet."""


@dataclass(slots=True)
class _Lane:
    """One leased lane."""

    cursor: LaneCursor = field(default_factory=LaneCursor)
    highest: int = -1
    """The last seq that was claimed."""
    passed: set[int] = field(default_factory=set)
    """The seqs above the floor that were claimed, or have a mark or an entry."""
    keys: dict[str, _Key] = field(default_factory=dict)
    alone: dict[int, tuple[WaitingDelivery, float]] = field(default_factory=dict)
    """The deliveries that wait without blocking a key, and when each is due."""
    kept: list[ClaimedDelivery] = field(default_factory=list)
    """Claimed deliveries kept back because the lane is about to be released."""
    is_new: bool = True
    """Whether its remaining deliveries must still be read from the database."""
    claimed: int = 0
    """How many deliveries were claimed since the lane was verified."""
    verified_at: float = field(default_factory=time.monotonic)


class DeliveryLanes:
    """The lanes of this replica. Pure bookkeeping, for one event loop.

    Args:
        on_use, on_leave: called with a lane when its first delivery becomes held, and
            when its last one is let go.
        clock: the clock for all times here.
    """

    def __init__(
        self,
        on_use: Callable[[int], None],
        on_leave: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.oldest = BEGINNING
        self._on_use = on_use
        self._on_leave = on_leave
        self._clock = clock
        self._lanes: dict[int, _Lane] = {}
        self._held: dict[int, tuple[int, float]] = {}
        self._count: Counter[int] = Counter()
        self._ready: Ready[ClaimedDelivery] = Ready()
        self._first = 0
        self._due: list[_Due] = []
        self._draining: dict[tuple[int, str], None] = {}
        self._behind: list[ClaimedDelivery] = []
        self._logged: set[int] = set()

    @property
    def new(self) -> list[int]:
        """The lanes that were leased but haven't been read yet."""
        return [number for number, lane in self._lanes.items() if lane.is_new]

    @property
    def blocked(self) -> list[str]:
        """The keys whose new deliveries must wait behind earlier ones."""
        return [key for lane in self._lanes.values() for key in lane.keys]

    @property
    def ready(self) -> int:
        """The number of deliveries that were claimed but not handed out yet."""
        return len(self._ready)

    @property
    def ready_tenants(self) -> list[str]:
        """The tenants of the ready deliveries."""
        return self._ready.tenants

    @property
    def next_due(self) -> float:
        """When the next waiting delivery is due; inf if none waits."""
        if self._draining:
            return self._clock() + _SOON
        return self._due[0].at if self._due else math.inf

    @property
    def held(self) -> Collection[int]:
        """The seqs of the deliveries that are held."""
        return self._held.keys()

    def is_stuck(self, without: Collection[str]) -> bool:
        """Return whether deliveries are ready, all of them for these tenants."""
        return self._ready.has_only(without)

    def take(self, lanes: Collection[int]) -> None:
        """Add lanes that were just leased."""
        for number in lanes:
            self._lanes[number] = _Lane()

    def lose(self, lanes: Collection[int]) -> None:
        """Forget lanes whose lease was lost; handed-out deliveries stay held."""
        for number in lanes:
            self._lanes.pop(number, None)
        for row in self._ready.remove(lambda row: row.lane in lanes):
            self.let_go(row)
        self._behind = [row for row in self._behind if row.lane not in lanes]

    def start(self, number: int, floor: int, passed: Iterable[int]) -> None:
        """Start claiming from a new lane.

        Args:
            number: the lane.
            floor: every delivery at or below it has a mark or an entry.
            passed: the seqs of the deliveries above it that have one.
        """
        lane = self._lanes.get(number)
        if lane is not None:
            lane.is_new = False
            lane.cursor.floor = lane.highest = floor
            lane.passed.update(passed)
            lane.verified_at = self._clock()

    def floors(self, leased: Collection[int]) -> dict[int, int]:
        """Return the floors of the lanes to claim from; lanes take turns."""
        ours = sorted(
            number
            for number in leased
            if number in self._lanes and not self._lanes[number].is_new
        )
        start = next((i for i, n in enumerate(ours) if n >= self._first), 0)
        turn = ours[start:] + ours[:start]
        return {number: self._lanes[number].cursor.floor for number in turn}

    def passed(self, floors: Collection[int]) -> list[int]:
        """Return the seqs that a claim from these lanes must skip."""
        return [seq for number in floors for seq in self._lanes[number].passed]

    def claimed(
        self,
        rows: Sequence[ClaimedDelivery],
        lanes: Sequence[int],
        snapshot: Snapshot | None,
        *,
        full: bool,
        drawn: int = -1,
    ) -> None:
        """Hold the rows claimed from `lanes`, in this order, and raise their floors.

        A full claim says nothing about the lanes after its last row.

        Args:
            drawn: see `LaneCursor.looked`.
        """
        last = {row.lane: row.seq for row in rows}
        self.claimed_aside(rows)
        seen = not full
        for number in reversed(lanes):
            lane = self._lanes.get(number)
            if lane is None:
                continue
            lane.highest = max(lane.highest, last.get(number, -1))
            if snapshot is not None and (seen or number in last):
                up_to = max(lane.highest, drawn) if seen else last[number]
                before = lane.cursor.floor
                lane.cursor.looked(up_to, snapshot, drawn)
                if lane.cursor.floor > before:
                    floor = lane.cursor.floor
                    lane.passed = {seq for seq in lane.passed if seq > floor}
            seen = seen or number in last
        if rows:
            self._first = rows[-1].lane + 1

    def claimed_aside(self, rows: Iterable[ClaimedDelivery]) -> None:
        """Hold claimed rows, or put them behind their key; floors stay unchanged."""
        for row in rows:
            lane = self._lanes.get(row.lane)
            if lane is None:
                continue
            lane.claimed += 1
            if row.seq > lane.cursor.floor:
                lane.passed.add(row.seq)
            if row.seq in self._held:
                continue
            if row.message.key in lane.keys:
                self._put_behind(lane, row)
            else:
                self._make_ready(row)

    def freed(
        self, leased: Collection[int], max_keys: int, max_places: int
    ) -> tuple[list[FreedKey], list[WaitingDelivery]]:
        """Return the draining keys of these lanes, and the places that are due."""
        now = self._clock()
        places: list[WaitingDelivery] = []
        while self._due and self._due[0].at <= now and len(places) < max_places:
            due = heapq.heappop(self._due)
            lane = self._lanes.get(due.lane)
            if lane is None:
                continue
            if due.key is not None:
                self._draining[due.lane, due.key] = None
            elif due.seq in lane.alone and lane.alone[due.seq][1] <= now:
                places.append(lane.alone.pop(due.seq)[0])
        keys: list[FreedKey] = []
        for number, key in list(self._draining):
            lane = self._lanes.get(number)
            known = None if lane is None else lane.keys.get(key)
            if known is None or any(at > now for at in known.due.values()):
                del self._draining[number, key]
            elif number in leased and len(keys) < max_keys:
                keys.append(FreedKey(number, key, known.above))
        for place in [place for place in places if place.lane not in leased]:
            places.remove(place)
            self.found(place)
        return keys, places

    def claimed_waiting(
        self,
        keys: Sequence[FreedKey],
        rows: Sequence[ClaimedDelivery | None],
        *,
        since: float,
        held: Collection[int],
        max_rows_each: int,
    ) -> None:
        """Hold the rows claimed for draining keys; free a key that has no more rows.

        Args:
            keys: the keys that were requested.
            rows: the rows found, those of each key in order of seq; None if there was
                no room for the rest.
            since: when they were requested.
            held: the seqs held at that time; their outcomes may have been written in
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
            known.due = {seq: at for seq, at in known.due.items() if at > since}
            if known.due:
                continue  # nacked in the meantime: the key is blocked again
            of_key = found.get((number, key), [])
            # These include deliveries given back in the meantime, in order.
            later = self._ready.remove(partial(_is_of, number, key))
            for row in of_key:
                known.above = row.seq
                if row.seq not in held and row.seq not in self._held:
                    self._hold(row)
                    later.append(row)
            for row in sorted(later, key=lambda row: row.seq):
                self._ready.add(row)
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
        for number in leased:
            lane = self._lanes.get(number)
            if lane is not None and lane.kept:
                kept, lane.kept = lane.kept, []
                for row in kept:
                    self._make_ready(row)
        for row in self._ready.remove(
            lambda row: row.lane not in leased or self._is_blocked(row)
        ):
            self._release(row)
            lane = self._lanes.get(row.lane)
            if lane is None:
                continue
            if self._is_blocked(row):
                self._put_behind(lane, row)
            else:
                lane.kept.append(row)
        return self._ready.take(limit, without)

    def block(self, row: ClaimedDelivery) -> None:
        """Hold back the rest of a delivery's key until that delivery is retried."""
        lane = self._lanes.get(row.lane)
        if lane is not None and row.message.key is not None:
            self._key(lane, row.message.key, row.seq).due[row.seq] = math.inf

    def refused(self, row: ClaimedDelivery, due: float) -> None:
        """Record when to retry a delivery whose nack is already in the log."""
        place = WaitingDelivery(
            row.lane, row.seq, row.created_at, row.attempts + 1, True
        )
        self._wait(place, row.message.key, due)

    def found(self, place: WaitingDelivery) -> None:
        """Schedule an immediate claim of the delivery at this place."""
        self._wait(place, None, self._clock())

    def found_waiting(
        self, place: WaitingDelivery, key: str | None, due: float
    ) -> None:
        """Record a delivery that the log lists as waiting."""
        if place.seq not in self.held and not self._is_kept(place):
            self._wait(place, key, due)

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
        elif row.seq in self._held:
            key = row.message.key
            self._ready.put_back(
                row,
                lambda other: (
                    key is not None and other.message.key == key and other.seq < row.seq
                ),
            )

    def let_go(self, row: ClaimedDelivery) -> None:
        """Stop holding a delivery: its outcome is written, or it has no outcome."""
        self._release(row)
        self._logged.discard(row.seq)

    def take_behind(self, limit: int) -> list[ClaimedDelivery]:
        """Remove and return deliveries that wait behind their key but aren't logged.

        Deliveries behind one whose nack isn't written yet stay: otherwise the lane's
        next owner would find them in the log and deliver them first.
        """
        taken: list[ClaimedDelivery] = []
        left: list[ClaimedDelivery] = []
        for row in self._behind:
            can_go = len(taken) < limit and not self._is_behind_unwritten(row)
            (taken if can_go else left).append(row)
        self._behind = left
        return taken

    def put_back_behind(self, rows: Sequence[ClaimedDelivery]) -> None:
        """Put back deliveries that couldn't be written."""
        self._behind = [
            *(row for row in rows if row.lane in self._lanes),
            *self._behind,
        ]

    def is_logged(self, row: ClaimedDelivery) -> bool:
        """Return whether the ack of a delivery goes to the log."""
        return row.is_logged or row.seq in self._logged

    def known(self) -> set[int]:
        """Return the seqs of known deliveries that may lack a mark or an entry."""
        return {
            *self._held,
            *(row.seq for row in self._behind),
            *(row.seq for lane in self._lanes.values() for row in lane.kept),
            *(seq for lane in self._lanes.values() for seq in lane.alone),
        }

    def held_since(self, before: float, seqs: Iterable[int]) -> set[int]:
        """Return those of `seqs` held since `before` that aren't in the log."""
        return {
            seq
            for seq in seqs
            if seq in self._held
            and self._held[seq][1] <= before
            and seq not in self._logged
        }

    def logged(self, seqs: Iterable[int]) -> None:
        """Record that these seqs have entries in the log, so their acks go there."""
        self._logged.update(seq for seq in seqs if seq in self._held)

    def is_verification_due(self, number: int, rows: int, interval: float) -> bool:
        """Return whether a lane is due for verification, by rows claimed or by time."""
        lane = self._lanes.get(number)
        return lane is not None and (
            lane.claimed >= rows or self._clock() - lane.verified_at >= interval
        )

    def verified(self, number: int) -> None:
        """Record that a lane was verified."""
        lane = self._lanes.get(number)
        if lane is not None:
            lane.claimed = 0
            lane.verified_at = self._clock()

    def _make_ready(self, row: ClaimedDelivery) -> None:
        self._hold(row)
        self._ready.add(row)

    def _hold(self, row: ClaimedDelivery) -> None:
        self._held[row.seq] = (row.lane, self._clock())
        self._count[row.lane] += 1
        if self._count[row.lane] == 1:
            self._on_use(row.lane)

    def _release(self, row: ClaimedDelivery) -> None:
        if self._held.pop(row.seq, None) is None:
            return
        self._count[row.lane] -= 1
        if not self._count[row.lane]:
            self._on_leave(row.lane)

    def _put_behind(self, lane: _Lane, row: ClaimedDelivery) -> None:
        assert row.message.key is not None
        self._key(lane, row.message.key, row.seq)
        if not row.is_logged:
            self._behind.append(row)

    def _key(self, lane: _Lane, key: str, seq: int) -> _Key:
        """Block a key if it isn't; its waiting deliveries from `seq` on are next."""
        known = lane.keys.setdefault(key, _Key(above=seq - 1))
        known.above = min(known.above, seq - 1)
        return known

    def _wait(self, place: WaitingDelivery, key: str | None, due: float) -> None:
        lane = self._lanes.get(place.lane)
        if lane is None:
            return
        if key is None:
            lane.alone[place.seq] = (place, due)
        else:
            self._key(lane, key, place.seq).due[place.seq] = due
        heapq.heappush(self._due, _Due(due, place.lane, place.seq, key))

    def _is_kept(self, place: WaitingDelivery) -> bool:
        lane = self._lanes.get(place.lane)
        return lane is not None and any(row.seq == place.seq for row in lane.kept)

    def _is_behind_unwritten(self, row: ClaimedDelivery) -> bool:
        lane, key = self._lanes.get(row.lane), row.message.key
        known = None if lane is None or key is None else lane.keys.get(key)
        return known is not None and math.inf in known.due.values()

    def _is_blocked(self, row: ClaimedDelivery) -> bool:
        lane, key = self._lanes.get(row.lane), row.message.key
        if lane is None or key is None or key not in lane.keys:
            return False
        return bool(lane.keys[key].due)
