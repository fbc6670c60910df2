"""Rows that are too large to load: the server moves them to the dead letters.

Rows are moved one at a time and in parallel with the claims: copying 60 MB takes the
server a second, and no lane should wait for that. Their settlement has logged them
before, so they are not lost if the relay ends. No lease is needed, because a row is
moved only once, whichever relay does it. Rows that couldn't be moved are retried after
the others.
"""

import asyncio
from collections.abc import Callable, Iterable
from uuid import UUID

from pillarbox.outbox.events import Event
from pillarbox.outbox.log.database_retry import DATABASE_ERRORS, DatabaseRetry
from pillarbox.outbox.log.lanes.batch import ClaimedMessage
from pillarbox.outbox.log.settle import move_to_dead_letters
from pillarbox.outbox.postgres.connection import Link
from pillarbox.relay.events import MessageDeadLettered


class OversizedRows:
    """Moves rows that are too large to load while their lanes continue.

    `run` is for a single task.

    Args:
        link: a connection for this purpose alone.
        reader: whose messages they are.
    """

    def __init__(
        self,
        link: Link,
        *,
        reader: str,
        notify: Callable[[Event], None],
    ) -> None:
        self._link = link
        self._reader = reader
        self._notify = notify
        self._rows: dict[UUID, ClaimedMessage] = {}
        self._some = asyncio.Event()

    def add(self, rows: Iterable[ClaimedMessage]) -> None:
        """Queue rows whose settlement is recorded; `run` moves them."""
        for row in rows:
            self._rows.setdefault(row.id, row)
            self._some.set()

    async def run(self) -> None:
        """Move rows until cancelled."""
        retry = DatabaseRetry(self._notify)
        try:
            while True:
                await self._some.wait()
                row = next(iter(self._rows.values()))
                try:
                    await self._move(row)
                except DATABASE_ERRORS as error:
                    # The others come first.
                    self._rows[row.id] = self._rows.pop(row.id)
                    await retry.failed(error)
                    continue
                del self._rows[row.id]
                retry.succeeded()
                if not self._rows:
                    self._some.clear()
        finally:
            await self._link.close()

    async def _move(self, row: ClaimedMessage) -> None:
        assert row.problem is not None
        nacked = [(row, row.problem)]
        async with self._link.use() as connection:
            await move_to_dead_letters(connection, nacked, self._reader, by_hand=True)
        self._notify(
            MessageDeadLettered(
                id=row.id,
                topic=row.topic,
                attempts=row.attempts + 1,
                reason=row.problem,
            )
        )
