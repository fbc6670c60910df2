"""What a replica knows of the lanes that it leases from the postgres broker.

Claiming writes nothing. Deliveries that are *held* (claimed, with no outcome written
yet) are known only here; whoever has the lane next finds them again. Claims start above
a lane's *floor*; `outbox/postgres/lane_cursor.py` says how it rises. Whatever makes a
delivery claimable again rewinds it, and a sweep every few seconds finds what was
changed by hand.

A key is *blocked* while one of its deliveries waits to be tried again.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from inbox.sources.postgres.ready import Ready
from outbox.message import Message
from outbox.postgres.lane_cursor import LaneCursor, Snapshot

BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)
# seq and created_at are drawn by one statement, but not in the same instant.
SKEW: Final = timedelta(hours=1)


class ClaimedDelivery(NamedTuple):
    """A delivery as it was read, and what is wrong with its row, if anything."""

    lane: int
    seq: int
    created_at: datetime
    attempts: int
    message: Message
    problem: str | None


@dataclass(slots=True)
class _Lane:
    """One leased lane."""

    cursor: LaneCursor = field(default_factory=LaneCursor)
    highest: int = -1
    """The last seq that was claimed."""
    waiting: dict[str, set[int]] = field(default_factory=dict)
    """The blocked keys, each with the seqs of the deliveries that block it."""
    is_new: bool = True
    """Its blocked keys and its first delivery must be read from the database."""


class DeliveryLanes:
    """The lanes of this replica. Pure bookkeeping, for one event loop.

    Args:
        on_use, on_leave: called with a lane when its first delivery is held, and when
            none is held any more.
    """

    def __init__(
        self, on_use: Callable[[int], None], on_leave: Callable[[int], None]
    ) -> None:
        self.oldest = BEGINNING
        self._on_use = on_use
        self._on_leave = on_leave
        self._lanes: dict[int, _Lane] = {}
        self._held: dict[int, int] = {}
        self._count: Counter[int] = Counter()
        self._ready: Ready[ClaimedDelivery] = Ready()
        self._first = 0

    @property
    def new(self) -> list[int]:
        """Lanes that were taken and have not been swept yet."""
        return [number for number, lane in self._lanes.items() if lane.is_new]

    @property
    def blocked(self) -> list[str]:
        """The keys of which nothing may be claimed."""
        return [key for lane in self._lanes.values() for key in lane.waiting]

    @property
    def ready(self) -> int:
        """How many deliveries were claimed and not handed out yet."""
        return len(self._ready)

    @property
    def ready_tenants(self) -> list[str]:
        """The tenants of those."""
        return self._ready.tenants

    def is_stuck(self, without: Collection[str]) -> bool:
        """Return whether something is ready, but only from these tenants."""
        return self._ready.has_only(without)

    def take(self, lanes: Collection[int]) -> None:
        """Add lanes that were just leased."""
        for number in lanes:
            self._lanes[number] = _Lane()

    def lose(self, lanes: Collection[int]) -> None:
        """Forget lanes whose lease is gone; what was handed out stays held."""
        for number in lanes:
            self._lanes.pop(number, None)
        self._drop(lambda row: row.lane in lanes)

    def floors(self, leased: Collection[int]) -> dict[int, int]:
        """Return the floors of the lanes to claim from, in turns."""
        ours = sorted(
            number
            for number in leased
            if number in self._lanes and not self._lanes[number].is_new
        )
        start = next((i for i, n in enumerate(ours) if n >= self._first), 0)
        turn = ours[start:] + ours[:start]
        return {number: self._lanes[number].cursor.floor for number in turn}

    def held_above(self, floors: dict[int, int]) -> list[int]:
        """Return the held deliveries that a claim above these floors would find."""
        return [seq for seq, lane in self._held.items() if seq > floors.get(lane, seq)]

    def claimed(
        self,
        rows: Sequence[ClaimedDelivery],
        lanes: Sequence[int],
        snapshot: Snapshot | None,
        *,
        full: bool,
    ) -> None:
        """Hold what was claimed from `lanes`, in that order, and raise their floors.

        A full claim says nothing about the lanes after its last row.
        """
        last = {row.lane: row.seq for row in rows}
        seen = not full
        for number in reversed(lanes):
            lane = self._lanes.get(number)
            if lane is None:
                continue
            lane.highest = max(lane.highest, last.get(number, -1))
            if snapshot is not None and (seen or number in last):
                up_to = lane.highest if seen else last[number]
                lane.cursor.looked(up_to, snapshot)
            seen = seen or number in last
        if rows:
            self._first = rows[-1].lane + 1
        self.claimed_aside(rows)

    def claimed_aside(self, rows: Iterable[ClaimedDelivery]) -> None:
        """Hold what was claimed out of order; the floors stay."""
        for row in rows:
            if row.lane in self._lanes and row.seq not in self._held:
                self._hold(row)
                self._ready.add(row)

    def hand_out(
        self, limit: int, leased: Collection[int], without: Collection[str] = ()
    ) -> list[ClaimedDelivery]:
        """Return at most `limit` claimed deliveries of lanes that are still leased.

        Tenants take turns; those in `without` get none. So the order of a key holds
        only if all its messages belong to one tenant.
        """
        self._drop(lambda row: row.lane not in leased or self._is_blocked(row))
        return self._ready.take(limit, without)

    def block(self, row: ClaimedDelivery) -> None:
        """Hold back the rest of a key until a delivery of it is tried again."""
        lane = self._lanes.get(row.lane)
        if lane is not None and row.message.key is not None:
            lane.waiting.setdefault(row.message.key, set()).add(row.seq)

    def found_waiting(self, rows: Iterable[tuple[int, int, str]]) -> None:
        """Note lane, seq and key of deliveries that wait in new lanes."""
        for number, seq, key in rows:
            if number in self._lanes:
                self._lanes[number].waiting.setdefault(key, set()).add(seq)

    def made_ready(self, lane: int, seq: int, key: str | None, at: datetime) -> None:
        """Note that a waiting delivery can be claimed again."""
        self.rewind(lane, seq, at)
        if key is None or lane not in self._lanes:
            return
        waiting = self._lanes[lane].waiting
        waiting.get(key, set()).discard(seq)
        if not waiting.get(key):
            waiting.pop(key, None)

    def found_head(self, lane: int, seq: int | None) -> None:
        """Note the first ready delivery of a lane; claims start there at the latest."""
        if lane in self._lanes:
            self._lanes[lane].is_new = False
            if seq is not None and seq <= self._lanes[lane].cursor.floor:
                self._lanes[lane].cursor.rewind(seq)

    def rewind(self, lane: int, seq: int, at: datetime) -> None:
        """Make a delivery claimable again."""
        known = self._lanes.get(lane)
        if known is not None:
            known.cursor.rewind(seq)
            self.oldest = min(self.oldest, at - SKEW)

    def give_back(self, row: ClaimedDelivery) -> None:
        """Make a delivery claimable that was handed out, ahead of its key's rest."""
        self.let_go(row)
        self.rewind(row.lane, row.seq, row.created_at)
        key = row.message.key
        if key is not None:
            self._drop(lambda other: other.message.key == key)

    def let_go(self, row: ClaimedDelivery) -> None:
        """Hold a delivery no longer: its outcome is written, or it has none."""
        if self._held.pop(row.seq, None) is None:
            return
        self._count[row.lane] -= 1
        if not self._count[row.lane]:
            self._on_leave(row.lane)

    def _hold(self, row: ClaimedDelivery) -> None:
        self._held[row.seq] = row.lane
        self._count[row.lane] += 1
        if self._count[row.lane] == 1:
            self._on_use(row.lane)

    def _is_blocked(self, row: ClaimedDelivery) -> bool:
        lane = self._lanes.get(row.lane)
        return lane is not None and row.message.key in lane.waiting

    def _drop(self, unwanted: Callable[[ClaimedDelivery], bool]) -> None:
        for row in self._ready.remove(unwanted):
            self.let_go(row)
            self.rewind(row.lane, row.seq, row.created_at)
