"""The doorbell: writers pay for a NOTIFY only when somebody sleeps.

A NOTIFY on every commit costs half of the writers' throughput, because its lock
serialises commits. So whoever is idle holds an advisory lock exclusively and
listens. The insert trigger tries that lock in shared mode, and rings only when it
fails. The trigger keeps the lock until its transaction ends, so `arm` fails while a
writer is under way, and nobody falls asleep before seeing that writer's rows.

Of several sleepers one holds the lock; the others rely on it, since the bell is
heard by all. When that one becomes busy it tells the others; when it dies, they
find out at their next poll. Polling always works, with or without the bell.
"""

import asyncio
from typing import Final

import psycopg
from psycopg.sql import SQL, Identifier

from outbox.errors import DatabaseUnavailableError
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.postgres.connection import Connection, Link
from outbox.postgres.sql_files import load

_BROKEN: Final = (psycopg.Error, DatabaseUnavailableError, TimeoutError)
_ANSWER: Final = 20.0


class Doorbell:
    """One sleeper's end of a doorbell. For one task at a time."""

    def __init__(
        self, url: str, *, lock: Lock, channel: str, application_name: str
    ) -> None:
        self._lock = {"class": LOCK_CLASS, "object": int(lock)}
        self._channel = channel
        self._link = Link(url, application_name=application_name)
        self._listening: Connection | None = None
        self._held = False

    async def arm(self) -> bool:
        """Try to make writers ring; look once more before you sleep.

        False means that a writer is under way, or the database is away: look again
        soon instead of sleeping.
        """
        try:
            async with asyncio.timeout(_ANSWER):
                connection = await self._link.connection()
                if self._listening is not connection:
                    self._held = False
                    await connection.execute(
                        SQL("LISTEN {}").format(Identifier(self._channel))
                    )
                    self._listening = connection
                if self._held:
                    return True
                cursor = await connection.execute(
                    load("outbox", "arm_doorbell"), self._lock
                )
                row = await cursor.fetchone()
        except _BROKEN:
            await self.close()
            return False
        ours, theirs = row or (False, False)
        self._held = ours
        return bool(ours or theirs)

    async def disarm(self) -> None:
        """Stop making writers ring: we are busy, and look again anyway."""
        if not self._held:
            return
        self._held = False
        try:
            async with asyncio.timeout(_ANSWER):
                connection = await self._link.connection()
                if connection is self._listening:
                    await connection.execute(
                        load("outbox", "disarm_doorbell"),
                        {**self._lock, "channel": self._channel},
                    )
        except _BROKEN:
            await self.close()

    async def wait(self, seconds: float) -> bool:
        """Wait for a ring, at most `seconds`; tell whether it rang."""
        connection = self._listening
        if connection is None or connection.closed:
            await asyncio.sleep(seconds)
            return False
        try:
            async for _ in connection.notifies(timeout=seconds, stop_after=1):
                return True
        except _BROKEN:
            await self.close()
        return False

    async def close(self) -> None:
        """Leave; the lock goes with the connection."""
        self._held = False
        self._listening = None
        await self._link.close()
