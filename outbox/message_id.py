"""UUIDv7: identifiers that contain the time at which they were generated.

`uuid.uuid7` of Python 3.14 guarantees less. It takes no lock: with several threads,
later identifiers sort before earlier ones, and many share everything but their last 32
bits. While the clock is behind the last identifier, each is a whole millisecond after
the previous one: a million messages added after the clock was set back would end a
quarter of an hour in the future, and receipts are partitioned by that time.
"""

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# A signal's handler, or a finalizer, may need an id while its own thread makes one.
_lock = threading.RLock()
_last = 0
if hasattr(os, "register_at_fork"):  # not on Windows
    # The child has no other threads, so no thread may hold the lock in it.
    os.register_at_fork(
        before=_lock.acquire,
        after_in_parent=_lock.release,
        after_in_child=_lock.release,
    )


def uuid7() -> UUID:
    """Generate a UUIDv7 (RFC 9562, section 6.2, method 3).

    Within one process the identifiers ascend strictly, even when the clock is set back:
    the 12 bits below the millisecond keep counting. Safe to call from any thread; a
    forked child doesn't repeat its parent's identifiers.
    """
    global _last
    now = time.time_ns()
    # 48 bits of milliseconds and 12 bits of the millisecond's 4096 parts.
    tick = (now // 1_000_000 << 12) | ((now % 1_000_000) * 4096 // 1_000_000)
    with _lock:
        _last = tick = max(tick, _last + 1)
    random = int.from_bytes(os.urandom(8)) & 0x3FFF_FFFF_FFFF_FFFF
    return UUID(
        int=(tick >> 12) << 80 | 0x7 << 76 | (tick & 0xFFF) << 64 | 0b10 << 62 | random
    )


def is_uuid7(value: UUID) -> bool:
    """Return whether `value` has version 7 and the variant of RFC 9562."""
    return value.int >> 76 & 0xF == 7 and value.int >> 62 & 0b11 == 0b10


def seconds_since_epoch(value: UUID) -> float | None:
    """Return the time of `moment_of` as a number; None if it isn't a UUIDv7."""
    number = value.int
    # `is_uuid7` without a call, since this runs for every message.
    if number >> 76 & 0xF != 7 or number >> 62 & 0b11 != 0b10:
        return None
    return (number >> 80) / 1000


def moment_of(value: UUID) -> datetime:
    """Return the time, to the millisecond, that a UUIDv7 contains.

    A CHECK compares the partition column with the SQL function `inbox.moment_of`, so
    the two functions must agree to the microsecond.
    """
    return _EPOCH + timedelta(milliseconds=value.int >> 80)
