"""Rows that are too large to load: moved to the dead letters by the server alone.

One at a time and beside the claims, which leave them out meanwhile: copying 60 MB
takes the server a second, for which no lane has to wait. It needs no lease, since a row
is moved once, whoever does it. What could not be moved is found by the next sweep.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

import psycopg

from outbox.errors import DatabaseUnavailableError, message_of
from outbox.events import Event
from outbox.postgres.connection import Link
from relay.claim import Claimed
from relay.events import DatabaseFound, DatabaseLost, MessageDeadLettered
from relay.lanes.board import LaneBoard
from relay.settle import move_to_dead_letters

_FIRST_PAUSE: Final = 0.1
_LAST_PAUSE: Final = 5.0


class OversizedRows:
    """Moves rows that are too large to load, with their lanes going on. For one task.

    Args:
        link: its own connection.
        board: told which rows to leave out of claims.
        origin: of the dead letters.
    """

    def __init__(
        self,
        link: Link,
        board: LaneBoard,
        *,
        origin: str,
        notify: Callable[[Event], None],
    ) -> None:
        self._link = link
        self._board = board
        self._origin = origin
        self._notify = notify
        self._rows: deque[Claimed] = deque()
        self._some = asyncio.Event()

    def add(self, rows: Iterable[Claimed]) -> None:
        """Have rows moved that a claim found; it returns at once."""
        for row in rows:
            if row.id not in self._board.aside:
                self._board.aside.add(row.id)
                self._rows.append(row)
                self._some.set()

    async def run(self) -> None:
        """Move rows until cancelled."""
        pause = _FIRST_PAUSE
        try:
            while True:
                await self._some.wait()
                row = self._rows.popleft()
                try:
                    await self._move(row)
                except (psycopg.Error, DatabaseUnavailableError) as error:
                    self._notify(DatabaseLost(reason=message_of(error), seconds=pause))
                    await self._link.close()
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LAST_PAUSE)
                else:
                    if pause > _FIRST_PAUSE:
                        self._notify(DatabaseFound())
                    pause = _FIRST_PAUSE
                finally:
                    # Not before the pause: a sweep finds it, and puts it at the end.
                    self._board.aside.discard(row.id)
                    if not self._rows:
                        self._some.clear()
        finally:
            await self._link.close()

    async def _move(self, row: Claimed) -> None:
        assert row.problem is not None
        connection = await self._link.connection()
        await move_to_dead_letters(
            connection, [(row, row.problem)], self._origin, by_hand=True
        )
        self._notify(
            MessageDeadLettered(
                id=row.id,
                topic=row.topic,
                attempts=row.attempts + 1,
                reason=row.problem,
            )
        )
