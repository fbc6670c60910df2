"""Waits after errors of the database."""

import asyncio
from collections.abc import Callable
from typing import Final

import psycopg

from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.events import Event
from pillarbox.outbox.log.events import DatabaseLost, DatabaseRecovered
from pillarbox.outbox.retry import RECONNECT

DATABASE_ERRORS: Final = (psycopg.Error, DatabaseUnavailableError)


class DatabaseRetry:
    """The pauses between attempts until one succeeds. For one event loop."""

    def __init__(self, notify: Callable[[Event], None]) -> None:
        self._notify = notify
        self._failures = 0

    async def failed(self, error: Exception) -> None:
        """Report an error, and wait."""
        self._failures += 1
        pause = RECONNECT.delay(self._failures).total_seconds()
        self._notify(DatabaseLost.of(error, pause))
        await asyncio.sleep(pause)

    def succeeded(self) -> None:
        """Report the end of an outage, if there was one."""
        if self._failures:
            self._failures = 0
            self._notify(DatabaseRecovered())
