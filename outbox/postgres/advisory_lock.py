"""Our advisory locks in PostgreSQL: each is a class and an object, both int4.

The migrations use the same numbers. One class belongs to the outbox and to the
doorbells; every consumer of the postgres broker has a class of its own.
"""

from enum import IntEnum, unique
from hashlib import sha256
from typing import Final

LOCK_CLASS: Final = int.from_bytes(b"pill")


@unique
class Lock(IntEnum):
    """Lock objects above the lanes, which are 0 to 47."""

    OUTBOX_DOORBELL = 100
    INBOX_DOORBELL = 101
    MEMBER = 102
    MIGRATION = 103
    DEAD_LETTERS = 104
    UPKEEP = 105
    MEASURE = 106
    MEASURE_BY_CONSUMER = 107


def consumer_class(consumer: str) -> int:
    """Return the lock class in which the replicas of a consumer share its lanes."""
    return int.from_bytes(
        sha256(f"inbox:{consumer}".encode()).digest()[:4], signed=True
    )
