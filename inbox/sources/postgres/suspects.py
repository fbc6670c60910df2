"""Which deliveries may have killed a replica, and how they are handed out.

What a dead replica had in work is written nowhere, but it is among the first that
whoever has its lane next claims. These are *suspects*: an attempt is counted for each
before it is handed out, and taken back if it comes back untried. Which one kills is
not known yet. So one that was counted before is handed out alone, and its neighbours
are charged once.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from inbox.sources.postgres.lanes import Claimed

_MAX_SUSPECTS: Final = 256
_ALONE: Final = timedelta(seconds=2)


@dataclass(slots=True)
class _Lane:
    taken_at: datetime | None = None
    left: int = _MAX_SUSPECTS
    ended: set[int] = field(default_factory=set)


class Suspects:
    """The suspects of the lanes of this replica. For one event loop.

    Those that were counted before don't use up the number of a lane: if more was in
    work than that, each death brings the count further, until it comes to the killer.

    Args:
        alone: how long the rest waits for one that is handed out alone, and that one
            for what is in work.
    """

    def __init__(self, alone: timedelta = _ALONE) -> None:
        self._alone = alone.total_seconds()
        self._lanes: dict[int, _Lane] = {}
        self._out: set[int] = set()
        self._counted: dict[int, Claimed] = {}
        self._lone: int | None = None
        self._until: float | None = None
        self._settled = asyncio.Event()

    @property
    def holds_up(self) -> bool:
        """Whether others wait for a suspect, or it for them; see `wait`."""
        return self._until is not None and time.monotonic() < self._until

    @property
    def in_work(self) -> list[Claimed]:
        """The suspects that were handed out and are not settled."""
        return list(self._counted.values())

    async def wait(self) -> None:
        """Wait until that may be over."""
        self._settled.clear()
        if self._until is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until - time.monotonic()):
                    await self._settled.wait()

    def take(self, lanes: Iterable[int]) -> None:
        """Begin with lanes that were just leased."""
        for number in lanes:
            self._lanes[number] = _Lane()

    def lose(self, lanes: Iterable[int]) -> None:
        """Forget lanes whose lease is gone."""
        for number in lanes:
            self._lanes.pop(number, None)

    def looked_into(self, lanes: Iterable[int], now: datetime) -> None:
        """Note that these lanes are ours, at the latest since then."""
        for number in lanes:
            if number in self._lanes:
                self._lanes[number].taken_at = now

    def came_to_an_end(self, lane: int, seq: int) -> None:
        """Note that a delivery is tried again because it failed: no suspect."""
        if lane in self._lanes and self._lanes[lane].left:
            self._lanes[lane].ended.add(seq)

    def choose(self, rows: Sequence[Claimed]) -> tuple[list[Claimed], list[Claimed]]:
        """Tell which of `rows`, a beginning, to hand out now, and which not yet."""
        if self._lone is not None and self.holds_up:
            return [], list(rows)
        self._lone = None
        known = (i for i, row in enumerate(rows) if row.attempts and self._is_one(row))
        first = next(known, len(rows))
        if first or not rows:
            self._until = None
            return list(rows[:first]), list(rows[first:])
        if self._out and (self._until is None or self.holds_up):
            self._until = self._until or time.monotonic() + self._alone
            return [], list(rows)
        # What is still out has lived long enough: no reason to wait for it again.
        self._out.clear()
        self._lone = rows[0].seq
        self._until = time.monotonic() + self._alone
        return [rows[0]], list(rows[1:])

    def hand_out(self, rows: Iterable[Claimed]) -> list[Claimed]:
        """Note what is handed out; give those for which an attempt is to be counted."""
        suspects: list[Claimed] = []
        for row in rows:
            self._out.add(row.seq)
            if self._is_one(row):
                suspects.append(row)
                self._counted[row.seq] = row
                lane = self._lanes[row.lane]
                lane.left -= not row.attempts
        return suspects

    def settle(self, row: Claimed) -> bool:
        """Note that a delivery is settled; tell whether its attempt was counted."""
        return self._counted.pop(row.seq, None) is not None

    def wrote(self, row: Claimed) -> None:
        """Note that its outcome is written, too: the death of another can't undo it."""
        self._out.discard(row.seq)
        if row.seq == self._lone or not self._out:
            self._lone = self._until = None
            self._settled.set()

    def acquit(self, row: Claimed) -> None:
        """Note that a suspect was given back untried: it is to come once more."""
        if row.lane in self._lanes:
            self._lanes[row.lane].left += not row.attempts

    def _is_one(self, row: Claimed) -> bool:
        lane = self._lanes.get(row.lane)
        return (
            lane is not None
            and lane.left > 0
            and lane.taken_at is not None
            # What was published since can't have been in other hands.
            and row.created_at <= lane.taken_at
            and row.seq not in lane.ended
        )
