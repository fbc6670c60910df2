"""Lanes: hash buckets of keys, the unit of order and of leasing.

A lane is `index of the priority * 16 + bucket`. `outbox.lane_of` is the same rule in
SQL. Python and PostgreSQL both have `sha256` built in, so all writers agree.
"""

from collections.abc import Collection, Sequence
from enum import StrEnum
from hashlib import sha256
from typing import Final
from uuid import UUID

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
