"""For every Python under libfaketime 0.9.10, whose clock_nanosleep() fails.

It takes a moment of the monotonic clock for one of the faked clock, and time.sleep()
sleeps until such a moment.
"""

import select
import time


def sleep(seconds: float) -> None:
    """Sleep as time.sleep() does, by select()."""
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], seconds)


time.sleep = sleep  # type: ignore[assignment]  # noqa: TID251
