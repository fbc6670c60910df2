"""Replaces time.sleep() under libfaketime 0.9.10, whose clock_nanosleep() fails.

libfaketime treats a time on the monotonic clock as one on the faked clock, and
time.sleep() sleeps until a time on the monotonic clock.
"""

import select
import time


def sleep(seconds: float) -> None:
    """Sleep as time.sleep() does, by select()."""
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], seconds)


time.sleep = sleep  # type: ignore[assignment]  # noqa: TID251
