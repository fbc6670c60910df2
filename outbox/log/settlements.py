"""Stores how far a reader has read a log."""

import time
from collections.abc import Iterable
from typing import Any

import psycopg

from outbox.array_literal import moment_array, plain_array
from outbox.log.claims import arrays_of
from outbox.log.lane import Advance, AnyLane
from outbox.log.takeover import SKEW, Clock
from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load


class Settlements:
    """The settlements of a reader."""

    def __init__(self, reader: str) -> None:
        self._reader = reader

    async def store(
        self, connection: Connection, advances: Iterable[Advance[Any]]
    ) -> None:
        """Store the positions of a settlement, in its transaction.

        Raises:
            psycopg.errors.UniqueViolation: another process has settled one of the
                lanes.
        """
        rows = [(advance, row) for advance in advances for row in advance.rows]
        if not rows:
            return
        await connection.execute(
            load("outbox.log", "store_positions"),
            {
                "reader": self._reader,
                "starts": moment_array([row.day.starts_at for _, row in rows]),
                "ends": moment_array([row.day.ends_at for _, row in rows]),
                "lanes": plain_array([advance.lane.number for advance, _ in rows]),
                "numbers": plain_array([row.number for _, row in rows]),
                **arrays_of([row.position for _, row in rows]),
                "messages": plain_array(
                    [it.messages.get(row.day, 0) for it, row in rows]
                ),
                "deferred": plain_array(
                    [it.deferred.get(row.day, 0) for it, row in rows]
                ),
                "next_xids": plain_array([it.after.next_xid for it, _ in rows]),
            },
            prepare=True,
        )

    async def move_fences(
        self, connection: Connection, lanes: Iterable[AnyLane], clock: Clock
    ) -> None:
        """Store the positions of today for lanes that were last settled in a day past.

        Nothing of these lanes may be in flight.
        """
        began = time.monotonic()
        moved: list[Advance[AnyLane]] = []
        for lane in lanes:
            progress = lane.progress
            if progress is None or max(progress.fence).ends_at > clock.now - SKEW:
                continue
            today = max(day for day, _ in progress.days if day.starts_at <= clock.now)
            if (stored := lane.move_fence(today)) is not None:
                moved.append(Advance(lane, *stored, {}, {}))
        try:
            await self.store(connection, moved)
        except psycopg.errors.UniqueViolation:
            # Another process has settled one of them.
            for advance in moved:
                advance.lane.require_takeover()
        else:
            for advance in moved:
                advance.lane.settled(advance.after, began)
                advance.lane.expire()
