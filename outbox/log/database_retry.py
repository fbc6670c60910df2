"""Waits after errors of the database, for longer each time."""

import asyncio
from collections.abc import Callable
from typing import Final

import psycopg

from outbox.errors import DatabaseUnavailableError
from outbox.events import Event
from outbox.log.events import DatabaseLost, DatabaseRecovered

DATABASE_ERRORS: Final = (psycopg.Error, DatabaseUnavailableError)
# Short at first: if the server restarted, only the connection is stale.
_FIRST_PAUSE: Final = 0.1
_LAST_PAUSE: Final = 5.0


class DatabaseRetry:
    """The pauses of what is repeated until it succeeds. For one event loop."""

    def __init__(self, notify: Callable[[Event], None]) -> None:
        self._notify = notify
        self._pause = _FIRST_PAUSE

    async def failed(self, error: Exception) -> None:
        """Report an error, and wait."""
        pause, self._pause = self._pause, min(self._pause * 2, _LAST_PAUSE)
        self._notify(DatabaseLost.of(error, pause))
        await asyncio.sleep(pause)

    def succeeded(self) -> None:
        """Report the end of an outage, if there was one."""
        if self._pause > _FIRST_PAUSE:
            self._pause = _FIRST_PAUSE
            self._notify(DatabaseRecovered())
