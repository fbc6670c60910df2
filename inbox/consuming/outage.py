"""The handlers' database, away and back: told once, and waited for."""

from datetime import timedelta
from typing import Final

from inbox.consuming.dispatch import Flight
from inbox.events import DatabaseFound, DatabaseLost
from outbox.errors import one_line
from outbox.events import Observers
from outbox.retry import RetryPolicy

_RECOVERY: Final = RetryPolicy(
    first_delay=timedelta(milliseconds=100), max_delay=timedelta(seconds=10)
)


class Outage:
    """What one run of a consumer knows of its database."""

    def __init__(self, consumer: str, observers: Observers) -> None:
        self._consumer = consumer
        self._notify = observers.notify
        self._is_lost = False

    async def wait(self, error: BaseException, times: int, flight: Flight) -> bool:
        """Wait after an error, the longer the more there were; False: it is to stop."""
        delay = _RECOVERY.delay(times)
        if not self._is_lost:
            self._is_lost = True
            self._notify(
                DatabaseLost(
                    consumer=self._consumer,
                    reason=one_line(error),
                    seconds=delay.total_seconds(),
                )
            )
        # Not parked: while it lasts, no more is to be fetched.
        return await flight.pause(delay)

    def end(self) -> None:
        """Tell that the database is back, if it was away."""
        if self._is_lost:
            self._is_lost = False
            self._notify(DatabaseFound(consumer=self._consumer))
