"""Count the dead letters at intervals, and report them as an event."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from outbox.dead_letters.events import (
    DeadLetterGroup,
    DeadLettersMeasured,
    DeadLettersUnknown,
)
from outbox.dead_letters.letter import Status
from outbox.dead_letters.retry import Retrier
from outbox.dead_letters.statement import Schema, Statement
from outbox.errors import OutboxError, one_line
from outbox.events import Event
from outbox.postgres.remedy import remedy_of


class Measure:
    """Measures the dead letters of one side. For one event loop.

    Args:
        open_retrier: called for each measurement, to read the dead letters.
        origin: the origin of the dead letters; None for all of the schema.
        seconds: the interval.
    """

    def __init__(
        self,
        open_retrier: Callable[[], AbstractAsyncContextManager[Retrier]],
        *,
        schema: Schema,
        origin: str | None,
        seconds: float,
        notify: Callable[[Event], None],
    ) -> None:
        self._open = open_retrier
        self._schema = schema
        self._origin = origin
        self._seconds = seconds
        self._notify = notify

    async def run(self) -> None:
        """Measure until cancelled. A failure is reported as an event."""
        while True:
            try:
                self._notify(await self.measure())
            except OutboxError as error:
                self._notify(
                    DeadLettersUnknown(
                        schema=self._schema,
                        reason=one_line(error),
                        remedy=remedy_of(error),
                    )
                )
            await asyncio.sleep(self._seconds)

    async def measure(self) -> DeadLettersMeasured:
        """Measure once.

        Raises:
            DatabaseUnavailableError: the database is unavailable.
        """
        async with self._open() as retrier:
            rows = await retrier.fetch(Statement.MEASURE, {})
        groups = [
            DeadLetterGroup(origin, Status(status), letters, seconds)
            for origin, status, letters, seconds in rows
            if self._origin in {None, origin}
        ]
        return DeadLettersMeasured(schema=self._schema, groups=tuple(groups))
