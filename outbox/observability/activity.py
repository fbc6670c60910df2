"""Report what a process has done as one event per interval."""

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, Protocol

from pillarbox.outbox.events import Event

IDLE_INTERVALS: Final = 60
"""After this many intervals without activity, the process reports anyway."""


class Counts(Protocol):
    """An observer that counts what a process does."""

    def __call__(self, event: Event) -> None:
        """Count what an event reports."""

    @property
    def is_active(self) -> bool:
        """Whether anything happened since the last `take`."""

    def take(self, period: timedelta) -> Event:
        """Return what happened since the last `take`, and start over."""


class Activity:
    """Reports what a process has done, at intervals. For one event loop.

    An interval without activity is reported only after `IDLE_INTERVALS` of them in a
    row, so a longer silence means that the process is gone.

    Args:
        counts: an observer of the process.
        clock: returns seconds; for tests.
    """

    def __init__(
        self,
        counts: Counts,
        interval: timedelta,
        notify: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self._interval = interval.total_seconds()
        self._notify = notify
        self._clock = clock
        self._since = clock()
        self._idle = 0

    async def run(self) -> None:
        """Report at intervals until cancelled, and then once more if active."""
        try:
            while True:
                await asyncio.sleep(self._interval)
                self.report()
        finally:
            if self._counts.is_active:
                self.report()

    def report(self) -> None:
        """End an interval, and report it unless there is nothing to report."""
        if not self._counts.is_active:
            self._idle += 1
            if self._idle < IDLE_INTERVALS:
                return
        self._idle = 0
        now = self._clock()
        period = timedelta(seconds=round(now - self._since))
        self._since = now
        self._notify(self._counts.take(period))
