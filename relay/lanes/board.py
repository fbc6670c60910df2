"""Which lanes to claim from next.

A lane goes round: *pick, claim, publish, settle, put back*. It is in flight once at
most, so its messages reach the broker in order.
"""

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

from outbox.lane import PRIORITIES, Priority, lanes_of, priority_of
from outbox.postgres.lease import Lease
from relay.lanes.lane import BEGINNING, SKEW, Lane
from relay.lanes.xid_horizon import Horizon

_ALL: Final = 1 << 20
_FEWEST_ROWS: Final = 16


class LaneBoard:
    """The lanes of this relay, and whose turn it is. For one event loop."""

    def __init__(
        self, lease: Lease, weights: Mapping[Priority, int], concurrency: int
    ) -> None:
        self._lease = lease
        self._weights = weights
        self._concurrency = concurrency
        self._credit = dict.fromkeys(PRIORITIES, 0)
        self._known: dict[int, Lane] = {}
        # The one that was served last is at the end.
        self._turns = {p: deque(lanes_of(p)) for p in PRIORITIES}
        self._look_everywhere = True
        self._work = asyncio.Event()
        self._dry = asyncio.Event()
        self._clock_offset = timedelta(0)
        self._most_rows = _ALL
        self.horizon = Horizon()
        self.aside: set[UUID] = set()
        """Rows on their way to the dead letters, which claims leave out."""

    def take(self, lanes: Collection[int]) -> None:
        """Begin with lanes that were just leased."""
        for number in lanes:
            self._known[number] = Lane(number)
        self.wake()

    def lose(self, lanes: Collection[int]) -> None:
        """Forget lanes whose lease is gone."""
        for number in lanes:
            self._known.pop(number, None)
        self._tell()

    def wake(self, *, strange: bool = False) -> None:
        """Look at every lane again; with `strange`, as if it were new.

        Somebody else may have settled the message that blocked a key, or have made
        one ready that lies below the floor.
        """
        for lane in self._known.values():
            lane.stir()
            lane.strange = lane.strange or strange
        self._look_everywhere = True
        self._tell()

    def look_aside(self) -> None:
        """Look again at the lanes that ran dry, each class when it is its turn."""
        for lane in self._known.values():
            if lane.dry:
                lane.stir()
        self._tell()

    def pick(self) -> Sequence[Lane]:
        """Choose the lanes of the next claim; give them back with `put_back`.

        After a wake-up all lanes together, most urgent class first: an idle relay
        finds a lone message with one claim. Under load a share of one class, each
        class getting turns by its weight.
        """
        waiting = self._waiting()
        if self._look_everywhere:
            chosen = [lane for lanes in waiting.values() for lane in lanes]
            self._look_everywhere = False
        elif waiting:
            priority = self._next_priority(waiting)
            share = math.ceil(self._active(priority) / self._concurrency)
            chosen = waiting[priority][:share]
        else:
            chosen = []
        for lane in chosen:
            lane.picked()
        self._lease.use([lane.number for lane in chosen])
        if chosen:
            self._tell()
        else:
            # The lease keeps them back, and takes or loses them with its next beat.
            self._work.clear()
        return chosen

    def served(self, lanes: Iterable[Lane]) -> None:
        """Send lanes that a claim has reached to the back of the queue."""
        for lane in lanes:
            turns = self._turns[priority_of(lane.number)]
            turns.remove(lane.number)
            turns.append(lane.number)

    def rows_worth_reading(self, batch_size: int) -> int:
        """Tell how many rows a claim should look at, of at most `batch_size`.

        The server has to read a row's headers to know their size. While few rows fill
        a claim, reading hundreds of them each time would make all lanes wait.
        """
        return min(batch_size, self._most_rows)

    def note_claim(self, rows: int, *, cut: bool) -> None:
        """Learn how many rows a claim found, and whether its bytes ended it."""
        if cut:
            self._most_rows = max(_FEWEST_ROWS, 2 * rows)
        elif rows >= self._most_rows:
            self._most_rows = min(_ALL, 2 * self._most_rows)

    def owns(self, lanes: Iterable[Lane]) -> bool:
        """Tell whether these lanes may be published from, ever since they were picked.

        A lane that was lost and taken again is another object.
        """
        lanes = list(lanes)
        return all(self._known.get(lane.number) is lane for lane in lanes) and (
            self._lease.holds([lane.number for lane in lanes])
        )

    def put_back(self, lanes: Iterable[Lane]) -> None:
        """End the flight of lanes."""
        returned = []
        for lane in lanes:
            lane.in_flight = False
            if self._known.get(lane.number) in {None, lane}:
                returned.append(lane.number)
        self._lease.leave(returned)
        self._tell()

    def find(self, number: int) -> Lane | None:
        """Give what is known of a lane, if it is still ours."""
        return self._known.get(number)

    def numbers(self) -> list[int]:
        """List the lanes that are ours."""
        return list(self._known)

    def set_clock(self, now: datetime) -> None:
        """Learn the database's clock."""
        self._clock_offset = now - datetime.now(UTC)

    def now(self) -> datetime:
        """Tell the database's time."""
        return datetime.now(UTC) + self._clock_offset

    def bounds(self, lanes: Sequence[Lane]) -> tuple[datetime, datetime]:
        """Bound `created_at`, so that the planner leaves all other days out."""
        newest = self.now() + SKEW
        return (
            min((lane.oldest for lane in lanes), default=BEGINNING),
            max([newest, *(lane.newest + SKEW for lane in lanes)]),
        )

    async def work(self) -> None:
        """Wait until a lane can be picked."""
        await self._work.wait()

    async def dry(self) -> None:
        """Wait until every lane was found empty and none is in flight."""
        await self._dry.wait()

    def _waiting(self) -> dict[Priority, list[Lane]]:
        allowed = self._lease.lanes
        waiting = {}
        for priority in PRIORITIES:
            lanes = [
                lane
                for number in self._turns[priority]
                if (lane := self._known.get(number)) is not None
                and not lane.dry
                and not lane.in_flight
                and number in allowed
            ]
            if lanes:
                waiting[priority] = lanes
        return waiting

    def _active(self, priority: Priority) -> int:
        known = (self._known.get(number) for number in lanes_of(priority))
        return sum(lane is not None and not lane.dry for lane in known)

    def _next_priority(self, waiting: Collection[Priority]) -> Priority:
        # Smooth weighted round robin: who waits longest for its weight is next.
        for priority in waiting:
            self._credit[priority] += self._weights[priority]
        best = max(waiting, key=lambda priority: self._credit[priority])
        self._credit[best] -= sum(self._weights[p] for p in waiting)
        return best

    def _tell(self) -> None:
        lanes = self._known.values()
        if any(not lane.dry and not lane.in_flight for lane in lanes):
            self._work.set()
        else:
            self._work.clear()
        if any(not lane.dry or lane.in_flight for lane in lanes):
            self._dry.clear()
        else:
            self._dry.set()
