"""Which lanes to claim from next, and what this relay knows of each.

A lane goes round: *pick, claim, publish, settle, put back*. It is in flight once at
most, so its messages reach the broker in order.

The *floor* of a lane is the seq at or below which nothing is left to claim: dead
index entries behind it are never walked again, not even while another session's
snapshot keeps them from being cleaned up. Whatever makes a row claimable again
rewinds it. A sweep without floor every few seconds finds what was changed by hand.

The floor lags behind the claims. Writers draw their seq before they commit, so a
claim may find 12 and not 11, whose transaction is still open; with the floor at 12,
what follows 11 in its key would overtake it. So a floor rises to 12 only by a later
claim, which began after all transactions of that time had ended, and so found 11.
"""

import asyncio
import math
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from outbox.lane import PRIORITIES, Priority, lanes_of, priority_of
from outbox.lease import Lease

BEGINNING: Final = datetime(2000, 1, 1, tzinfo=UTC)
_SKEW: Final = timedelta(hours=1)


class Snapshot(NamedTuple):
    """Which transactions a claim could not see, by their ids."""

    oldest: int
    """All below had ended."""
    end: int
    """None from here on had begun to write."""


class Lane:
    """What this relay knows of one lane that it holds."""

    __slots__ = (
        "blocked",
        "dry",
        "floor",
        "in_flight",
        "number",
        "oldest",
        "rewound",
        "seen",
        "stirred",
        "strange",
        "sweep",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.floor = -1
        self.oldest = BEGINNING
        self.blocked: set[str] = set()
        self.strange = True
        """Its blocked keys are to be read from the database."""
        self.sweep = True
        """The next claim goes without floor."""
        self.dry = False
        """The last look found nothing."""
        self.in_flight = False
        self.stirred = False
        """Something may have come since the claim that is under way."""
        self.rewound: int | None = None
        self.seen: tuple[int, int] | None = None
        """Up to which seq a claim saw what had committed, and that snapshot's end."""

    def rewind(self, seq: int, created_at: datetime) -> None:
        """Make a row claimable again."""
        self.floor = min(self.floor, seq - 1)
        self.oldest = min(self.oldest, created_at)
        # A claim may be under way, which raises the floor when it returns.
        if self.rewound is None or self.floor < self.rewound:
            self.rewound = self.floor
        self.seen = None
        self.stir()

    def picked(self) -> None:
        """Begin a flight; what happens from now on concerns its claim."""
        self.in_flight = True
        self.stirred = False
        self.rewound = None

    def stir(self) -> None:
        """Look at it again."""
        self.dry = False
        self.stirred = True

    def found_empty(self) -> None:
        """Leave it alone until it is stirred, unless it just was."""
        self.dry = not self.stirred

    def claimed_up_to(self, seq: int, snapshot: Snapshot) -> None:
        """Raise the floor as far as no open transaction may still bring a row.

        Not at all if it was rewound while the claim was under way.
        """
        if self.rewound is not None:
            return
        if self.seen is not None and snapshot.oldest >= self.seen[1]:
            self.floor = max(self.floor, min(seq, self.seen[0]))
            self.seen = None
        if self.seen is None:
            self.seen = (seq, snapshot.end)

    def swept(self, oldest: datetime) -> None:
        """Bound `created_at` anew, unless a row was rewound under way."""
        self.sweep = False
        self.oldest = oldest if self.rewound is None else min(oldest, self.oldest)


class Lanes:
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

    def wake(self, *, sweep: bool = False) -> None:
        """Look at every lane again; with `sweep`, without floors.

        A sweep also reads the blocked keys again: somebody else may have settled
        the message that blocked one.
        """
        for lane in self._known.values():
            lane.stir()
            lane.sweep = lane.sweep or sweep
            lane.strange = lane.strange or sweep
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
            owned = sum(n in self._known for n in lanes_of(priority))
            share = math.ceil(owned / self._concurrency)
            chosen = waiting[priority][:share]
        else:
            chosen = []
        for lane in chosen:
            lane.picked()
            turns = self._turns[priority_of(lane.number)]
            turns.remove(lane.number)
            turns.append(lane.number)
        self._lease.use([lane.number for lane in chosen])
        if chosen:
            self._tell()
        else:
            # The lease keeps them back, and takes or loses them with its next beat.
            self._work.clear()
        return chosen

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

    def newest(self) -> datetime:
        """Bound `created_at` from above, for partitions made ahead to be left out."""
        return datetime.now(UTC) + self._clock_offset + _SKEW

    def oldest(self, found: datetime | None) -> datetime:
        """Bound `created_at` from below, given the oldest row that a sweep found."""
        return (found or datetime.now(UTC) + self._clock_offset) - _SKEW

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
