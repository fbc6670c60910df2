"""Lanes: hash buckets of keys, the unit of order and of leasing.

A lane is `index of the priority * 16 + bucket`. `outbox.lane_of` is the same rule in
SQL. Python and PostgreSQL both have `sha256` built in, so all writers agree.
"""

from collections.abc import Callable, Collection, Iterator, Sequence, Sized
from enum import StrEnum
from hashlib import sha256
from typing import Final, Generic, TypeVar
from uuid import UUID

L = TypeVar("L", bound=Sized)

BUCKETS: Final = 16


class Priority(StrEnum):
    """The class in which a message waits; classes are served in turn, by weight."""

    REALTIME = "realtime"
    DEFAULT = "default"
    BULK = "bulk"


PRIORITIES: Final[Sequence[Priority]] = tuple(Priority)
WEIGHTS: Final = {Priority.REALTIME: 6, Priority.DEFAULT: 3, Priority.BULK: 1}
"""How often each gets its turn in a round while all of them have messages."""
_FIRST_LANE: Final = {p: i * BUCKETS for i, p in enumerate(PRIORITIES)}
LANES: Final = BUCKETS * len(PRIORITIES)


def bucket_of(key: str | None, id: UUID) -> int:
    """Hash a key to 0..15, or use the random tail of the id if there is no key."""
    if key is None:
        return id.int & 0xF
    return sha256(key.encode()).digest()[0] & 0xF


def lane_of(key: str | None, id: UUID, priority: Priority) -> int:
    """Return the lane of a message, 0..47."""
    return _FIRST_LANE[priority] + bucket_of(key, id)


def lanes_of(priority: Priority) -> range:
    """Return all lanes of a priority class."""
    return range(_FIRST_LANE[priority], _FIRST_LANE[priority] + BUCKETS)


def priority_of(lane: int) -> Priority:
    """Return the priority class of a lane."""
    return PRIORITIES[lane // BUCKETS]


class Turns:
    """Decides which priority is served next: smooth weighted round robin."""

    def __init__(self) -> None:
        self._credit = dict.fromkeys(PRIORITIES, 0)

    def next(self, waiting: Collection[Priority]) -> Priority:
        """Return one of those with messages."""
        for priority in waiting:
            self._credit[priority] += WEIGHTS[priority]
        best = max(
            filter(waiting.__contains__, PRIORITIES), key=self._credit.__getitem__
        )
        self._credit[best] -= sum(map(WEIGHTS.__getitem__, waiting))
        return best


class Lines(Generic[L]):
    """A line of each priority; those that aren't empty take turns by weight."""

    def __init__(self, make: Callable[[], L]) -> None:
        self._lines = {priority: make() for priority in PRIORITIES}
        self._turns = Turns()

    def __getitem__(self, priority: Priority) -> L:
        return self._lines[priority]

    def __iter__(self) -> Iterator[L]:
        return iter(self._lines.values())

    def waiting(self, left_out: Collection[Priority] = ()) -> list[Priority]:
        """Return the priorities whose lines aren't empty."""
        return [p for p, line in self._lines.items() if line and p not in left_out]

    def next(self, left_out: Collection[Priority] = ()) -> L | None:
        """Return the line whose turn it is; None if all are empty or left out."""
        waiting = self.waiting(left_out)
        if len(waiting) > 1:
            return self._lines[self._turns.next(waiting)]
        return self._lines[waiting[0]] if waiting else None
