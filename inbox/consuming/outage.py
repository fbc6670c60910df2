"""Wait while the handlers' database is unavailable, and report it.

After its own delay, each message waits until one *probe* for all of them has succeeded,
so a server that starts isn't asked by each at the same time.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from itertools import count
from typing import Final

from inbox.consuming.dispatch import Dispatcher
from inbox.events import HandlerDatabaseLost, HandlerDatabaseRecovered
from outbox.errors import one_line
from outbox.events import Observers
from outbox.gather import end
from outbox.postgres.remedy import remedy_of
from outbox.retry import RECONNECT

_REPORT_AGAIN: Final = 20.0
"""Seconds after which a continuing outage is reported again."""


class DatabaseOutage:
    """Waits while the handlers' database is unavailable, and reports the outage.

    Args:
        probe: raises an error as long as the database can't be used.
    """

    def __init__(
        self,
        consumer: str,
        observers: Observers,
        probe: Callable[[], Awaitable[None]],
    ) -> None:
        self._consumer = consumer
        self._notify = observers.notify
        self._probe = probe
        self._probing: asyncio.Task[None] | None = None
        self._is_lost = False
        self._report_at = -math.inf

    async def wait(
        self, error: BaseException, times: int, dispatcher: Dispatcher
    ) -> bool:
        """Wait with backoff after an error; return False if the consumer stops."""
        delay = RECONNECT.delay(times)
        self.begin(error, delay)
        # Still in flight, so that fetching pauses during an outage.
        if not await dispatcher.pause(delay):
            return False
        if not self._is_lost:
            return True
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._until_answered())
        return await dispatcher.wait_for(self._probing)

    async def _until_answered(self) -> None:
        for times in count(1):
            try:
                await self._probe()
            except Exception as error:  # noqa: BLE001 (whatever keeps it from answering)
                delay = RECONNECT.delay(times)
                self.begin(error, delay)
                await asyncio.sleep(delay.total_seconds())
            else:
                return

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
        if self._is_lost:
            self._is_lost = False
            self._report_at = -math.inf
            self._notify(HandlerDatabaseRecovered(consumer=self._consumer))
            if self._probing is not None:
                self._probing.cancel()

    async def close(self) -> None:
        """End a probe."""
        if self._probing is not None:
            await end([self._probing])
