"""UUIDv7: identifiers that contain the time at which they were generated."""

import os
import threading
import time
from datetime import UTC, datetime, timedelta
from uuid import UUID

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_lock = threading.Lock()
_last = 0


def uuid7() -> UUID:
    """Make a UUIDv7 (RFC 9562, section 5.7, method 1).

    Within one process the identifiers ascend strictly: 12 bits below the
    millisecond count on when several fall into one. Safe to call from any thread.
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
    """Tell whether `value` has version 7 and the RFC 9562 variant."""
    return value.int >> 76 & 0xF == 7 and value.int >> 62 & 0b11 == 0b10


def moment_of(value: UUID) -> datetime:
    """Read the moment, to the millisecond, out of a UUIDv7.

    The same as the SQL function `inbox.moment_of`, which a CHECK holds against
    the partition column: both must agree to the microsecond.
    """
    return _EPOCH + timedelta(milliseconds=value.int >> 80)
