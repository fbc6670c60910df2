"""The doorbell: writers pay for a NOTIFY only while a process sleeps.

A NOTIFY on every commit costs half of the writers' throughput, because its lock
serializes commits. So an idle process holds an advisory lock exclusively and listens.
The insert trigger tries that lock in shared mode and sends a NOTIFY only if that fails.
It keeps the lock until its transaction ends, so `arm` fails while a writer's
transaction is open, and no process falls asleep before it sees that writer's rows.

Of several sleeping processes, one holds the lock, and all are notified. When the
holder becomes busy, it notifies the others; when it dies, they find out at their next
poll. Polling always works, with or without the bell.
"""

import asyncio
from enum import IntEnum
from typing import Final

import psycopg
from psycopg.sql import SQL, Identifier

from pillarbox.outbox.errors import DatabaseUnavailableError
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from pillarbox.outbox.postgres.connection import Connection, Link, Server
from pillarbox.outbox.postgres.sql_files import load

_BROKEN: Final = (psycopg.Error, DatabaseUnavailableError)


class Armed(IntEnum):
    """Whether writers ring; only `NO` is false.

    Attributes:
        NO: a writer's transaction is open, or the database is unavailable.
        ANEW: from now on: what was written before did not ring.
        STILL: they have rung since an earlier call, too.
    """

    NO = 0
    ANEW = 1
    STILL = 2


class Doorbell:
    """One process's side of a doorbell. For one task at a time."""

    def __init__(
        self,
        url: str,
        *,
        lock: Lock,
        channel: str,
        application_name: str,
        server: Server | None = None,
    ) -> None:
        self._lock = {"class": LOCK_CLASS, "object": int(lock)}
        self._channel = channel
        self._link = Link(url, application_name=application_name, server=server)
        self._listening: Connection | None = None
        self._held = False

    async def arm(self) -> Armed:
        """Try to make writers ring.

        If it is armed again, check for rows once more before sleeping. If it isn't
        armed, check again soon instead of sleeping.
        """
        try:
            connection = await self._link.connection()
            if self._listening is not connection:
                self._held = False
                await connection.execute(
                    SQL("LISTEN {}").format(Identifier(self._channel))
                )
                self._listening = connection
            if self._held:
                return Armed.STILL
            cursor = await connection.execute(
                load("outbox", "arm_doorbell"), self._lock
            )
            row = await cursor.fetchone()
        except _BROKEN:
            await self.close()
            return Armed.NO
        ours, theirs = row or (False, False)
        self._held = ours
        return Armed.ANEW if ours or theirs else Armed.NO

    async def disarm(self) -> None:
        """Stop making writers ring: a busy process checks for rows anyway."""
        if not self._held:
            return
        self._held = False
        try:
            connection = await self._link.connection()
            if connection is self._listening:
                await connection.execute(
                    load("outbox", "disarm_doorbell"),
                    {**self._lock, "channel": self._channel},
                )
        except _BROKEN:
            await self.close()

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for a ring; return whether it rang."""
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
        """Disconnect, which releases the lock."""
        self._held = False
        self._listening = None
        await self._link.close()
