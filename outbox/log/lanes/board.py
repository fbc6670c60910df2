"""Chooses the lanes of the next claim.

A lane goes through a cycle: *pick, claim, publish, settle, put back*. At most one batch
of it is in flight, so its messages reach the broker in order.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from datetime import datetime
from typing import Final

from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.lane import PRIORITIES, Priority, Turns, lanes_of
from pillarbox.outbox.log.lanes.keys import FAR_AWAY
from pillarbox.outbox.log.lanes.lane import Lane
from pillarbox.outbox.log.reader import LogReader
from pillarbox.outbox.postgres.advisory_lock import MAIN
from pillarbox.outbox.postgres.lease import Lease

_MANY: Final = 8
"""After this many claims with messages, without being idle, it is busy."""


class LaneBoard:
    """The lanes of this relay, and whose turn it is. For one event loop."""

    def __init__(
        self,
        lease: Lease,
        concurrency: int,
        reader: str = MAIN,
    ) -> None:
        self._lease = lease
        self._concurrency = concurrency
        self._priorities = Turns()
        self._known: dict[int, Lane] = {}
        # The lane served last is at the end of its queue.
        self._turns = {p: deque(lanes_of(p)) for p in PRIORITIES}
        self._claim_everywhere = True
        self._recheck: set[int] = set()
        """Idle lanes that the next claim reads."""
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._wants_due = asyncio.Event()
        self.searched_at = FAR_AWAY
        """When due messages are searched for next, by the database's clock; in the far
        future while it is not known."""
        self.writers_ring = False
        """Whether each commit of a message wakes the relay. If so, a lane that was read
        to its end isn't read again until then."""
        self._has_found = False
        self._claims = 0
        """How many claims have found messages since all lanes were idle."""
        self.make_lane: Callable[[int], Lane] = Lane
        self.reader = LogReader(reader)
        self.gets_all = False
        """Whether the reader has got every topic since it began; see `ReaderRecord`."""
        self.acked: BoundedDict[Hashable, None] = BoundedDict()
        """Messages that the broker has acked, although they could not be settled."""

    def take(self, lanes: Collection[int]) -> None:
        """Add lanes that were just leased."""
        for number in lanes:
            self._known[number] = self.make_lane(number)
        self.wake()

    def lose(self, lanes: Collection[int]) -> None:
        """Forget lanes whose lease was released or lost."""
        for number in lanes:
            self._known.pop(number, None)
        self._update_events()

    def wake(self, *, refresh: bool = False) -> None:
        """Make claims read every lane again; with `refresh`, as if it were new.

        Another process may have settled the message that blocked a key, or made a
        message below the floor ready.
        """
        Lane.wake_all(self._known.values())
        if refresh:
            for lane in self._known.values():
                lane.require_refresh()
        self._claim_everywhere = True
        self._update_events()

    def take_over(self) -> None:
        """Make claims take every lane over again: the reader has more topics.

        In memory, the lanes have passed the messages of these topics.
        """
        for lane in self._known.values():
            lane.expire()
        self.wake(refresh=True)

    def recheck_idle(self) -> None:
        """Make one claim read all idle lanes again."""
        idle = [lane for lane in self._known.values() if lane.idle]
        Lane.wake_all(idle)
        self._recheck.update([lane.number for lane in idle])
        self._update_events()

    def pick(self, left_out: Collection[Priority] = ()) -> Sequence[Lane]:
        """Choose the lanes of the next claim; return them with `put_back`.

        After a wake-up, choose all lanes together, the most urgent priority first, so
        that an idle relay finds a single message with one claim. Under load, choose a
        share of the lanes of one priority; priorities take turns by weight. Idle lanes
        are read together from time to time. None is of a priority that is left out.
        """
        waiting = self._waiting(left_out)
        everything = [lane for lanes in waiting.values() for lane in lanes]
        idle = [lane for lane in everything if lane.number in self._recheck]
        if self._claim_everywhere or idle:
            chosen = everything if self._claim_everywhere else idle
            self._claim_everywhere = False
            self._recheck.clear()
        elif waiting:
            priority = self._priorities.next(waiting)
            share = math.ceil(self._active(priority) / self._concurrency)
            chosen = waiting[priority][:share]
        else:
            chosen = []
        return self._picked(chosen)

    def pick_all(self) -> Sequence[Lane]:
        """Choose all lanes that have more, for a search; it isn't their turn."""
        return self._picked([it for lanes in self._waiting().values() for it in lanes])

    def _picked(self, chosen: Sequence[Lane]) -> Sequence[Lane]:
        Lane.picked(chosen)
        self._lease.use([lane.number for lane in chosen])
        if chosen:
            self._update_events()
        else:
            # The lease withholds the waiting lanes until its next heartbeat.
            self._work.clear()
        return chosen

    def opened(self, at: float, lanes: Iterable[Lane]) -> None:
        """Forget what was read of lanes before a session was opened that claims them.

        The server may have crashed in between; see `LogReader.opened`.
        """
        self.reader.opened(at)
        for lane in lanes:
            if 0 < lane.known_at < at:
                lane.doubt()

    def served(self, lanes: Iterable[Lane]) -> None:
        """Move lanes that a claim has reached to the back of the queue."""
        numbers = [lane.number for lane in lanes]
        for turns in self._turns.values():
            for number in [number for number in numbers if number in turns]:
                turns.remove(number)
                turns.append(number)

    def note_claim(self, rows: int, *, is_cut: bool) -> None:
        """Record how many rows a claim found, and whether it left some."""
        if rows:
            self._has_found = True
            self._claims += _MANY if is_cut else 1

    @property
    def is_busy(self) -> bool:
        """Whether there are more messages than one claim takes, or all the time."""
        return self._claims >= _MANY

    def has_found(self) -> bool:
        """Return whether a claim has found rows since the last call."""
        found, self._has_found = self._has_found, False
        return found

    def owns(self, lanes: Iterable[Lane]) -> bool:
        """Return whether this relay has held these lanes continuously since `pick`.

        A lane that was lost and leased again is a new object.
        """
        lanes = list(lanes)
        return all(self._known.get(lane.number) is lane for lane in lanes) and (
            self._lease.holds([lane.number for lane in lanes])
        )

    def put_back(self, lanes: Collection[Lane], *, used: Collection[Lane] = ()) -> None:
        """Make lanes available again after their batch.

        Args:
            used: those with messages in hand.
        """
        Lane.put_back(lanes)
        unused = [lane for lane in lanes if lane not in used]
        known = self._known
        self._lease.leave(
            [it.number for it in unused if known.get(it.number) in {None, it}]
        )
        self._update_events()

    def keep(self, lane: Lane) -> None:
        """Let no claim pick a lane until it is put back."""
        Lane.picked([lane])
        self._update_events()

    def leave(self, lane: Lane) -> None:
        """Record that no message of a lane is in hand, unless a claim has picked it."""
        if not lane.in_flight and self._known.get(lane.number) in {None, lane}:
            self._lease.leave([lane.number])

    def find(self, number: int) -> Lane | None:
        """Return a lane, or None if this relay doesn't hold it."""
        return self._known.get(number)

    def count_blocked_keys(self) -> int:
        """Count the blocked keys of this relay's lanes."""
        return sum(len(lane.keys.blocked) for lane in self._known.values())

    def numbers(self) -> list[int]:
        """Return the numbers of this relay's lanes."""
        return list(self._known)

    def forget_floors(self) -> None:
        """Forget what no claim needs any more."""
        self.reader.claims.forget(self._known.values())

    def restart_log(self) -> None:
        """Read the log from its beginning, because its sequence begins again."""
        for lane in self._known.values():
            lane.restart_log()

    def ask_for_due(self) -> None:
        """Request a search for due messages."""
        self._wants_due.set()

    def expect_due(self, moments: Iterable[datetime]) -> None:
        """Request a search if messages are due before the next one."""
        if any(moment < self.searched_at for moment in moments):
            self.ask_for_due()

    async def wants_due(self) -> None:
        """Wait until due messages are requested."""
        await self._wants_due.wait()
        self._wants_due.clear()

    async def work(self) -> None:
        """Wait until a lane can be picked."""
        # Another worker may have picked it by the time that this one runs.
        while not self._work.is_set():
            await self._work.wait()

    async def idle(self) -> None:
        """Wait until every lane is idle and none is in flight."""
        await self._idle.wait()

    def _waiting(
        self, left_out: Collection[Priority] = ()
    ) -> dict[Priority, list[Lane]]:
        allowed = self._lease.lanes
        waiting = {}
        for priority in PRIORITIES:
            lanes = [
                lane
                for number in self._turns[priority]
                if (lane := self._known.get(number)) is not None
                and not lane.idle
                and not lane.in_flight
                and number in allowed
                and priority not in left_out
            ]
            if lanes:
                waiting[priority] = lanes
        return waiting

    def _active(self, priority: Priority) -> int:
        known = (self._known.get(number) for number in lanes_of(priority))
        return sum(lane is not None and not lane.idle for lane in known)

    def _update_events(self) -> None:
        # A comprehension and not generators, since it runs often.
        lanes = self._known.values()
        flying = [it.in_flight for it in lanes if it.in_flight or not it.idle]
        if False in flying:
            self._work.set()
        else:
            self._work.clear()
        if flying:
            self._idle.clear()
        else:
            self._claims = 0
            self._idle.set()
