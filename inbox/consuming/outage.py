"""Wait while the handlers' database is unavailable: one message probes it for all."""

import asyncio
import math
import time
from datetime import timedelta
from typing import Final

from pillarbox.inbox.consuming.dispatch import Dispatcher
from pillarbox.inbox.events import HandlerDatabaseLost, HandlerDatabaseRecovered
from pillarbox.inbox.handlers.checks import check_writable
from pillarbox.inbox.handlers.executor import Executor
from pillarbox.outbox.errors import one_line
from pillarbox.outbox.events import Observers
from pillarbox.outbox.postgres.remedy import remedy_of
from pillarbox.outbox.retry import RECONNECT

_REPORT_AGAIN: Final = 20.0
"""Seconds after which a continuing outage is reported again."""


class DatabaseOutage:
    """Waits while the handlers' database is unavailable, and reports the outage."""

    def __init__(self, consumer: str, observers: Observers, executor: Executor) -> None:
        self._consumer = consumer
        self._notify = observers.notify
        self._executor = executor
        self._probing = asyncio.Lock()
        self._is_down = self._is_lost = False
        self._report_at = -math.inf

    async def wait(
        self, error: BaseException, times: int, dispatcher: Dispatcher
    ) -> bool:
        """Wait with backoff after an error; return False if the consumer stops."""
        self._is_down, delay = True, RECONNECT.delay(times)
        self.begin(error, delay)
        # Still in flight, so that fetching pauses during an outage.
        if not await dispatcher.pause(delay):
            return False
        async with self._probing:
            while self._is_down and not dispatcher.stopping.is_set():
                try:
                    await check_writable(self._executor)
                    self._is_down = False
                except Exception as raised:  # noqa: BLE001 (whatever keeps it away)
                    times += 1
                    delay = RECONNECT.delay(times)
                    self.begin(raised, delay)
                    await dispatcher.pause(delay)
        return not dispatcher.stopping.is_set()

    def begin(self, error: BaseException, delay: timedelta) -> None:
        """Report an error, after which the next try begins in `delay`."""
        now = time.monotonic()
        if now >= self._report_at:
            self._is_lost = True
            self._report_at = now + _REPORT_AGAIN
            self._notify(
                HandlerDatabaseLost(
                    consumer=self._consumer,
                    reason=one_line(error),
                    remedy=remedy_of(error),
                    seconds=delay.total_seconds(),
                )
            )

    def end(self) -> None:
        """Report that the database is back, if it was unavailable."""
        self._is_down = False
        if self._is_lost:
            self._is_lost = False
            self._report_at = -math.inf
            self._notify(HandlerDatabaseRecovered(consumer=self._consumer))
