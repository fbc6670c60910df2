"""Recent messages, claimed and settled repeatedly by the relay's own steps.

No relay runs, because its own work would mask any additional work of the server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import psycopg

from pillarbox.outbox.lane import Priority, lanes_of
from pillarbox.outbox.log.claim import claim_batch
from pillarbox.outbox.log.lanes.board import LaneBoard
from pillarbox.outbox.log.lanes.lane import Lane
from pillarbox.outbox.log.process import SETTINGS
from pillarbox.outbox.log.settle import Settlement, store_settlement
from pillarbox.outbox.postgres.connection import connect, conninfo
from pillarbox.outbox.postgres.lease import Lease
from pillarbox.relay.config import RelayConfig
from pillarbox.relay.publisher import Acked
from pillarbox.relay.settle import settle

CONFIG = RelayConfig()
LANES = tuple(lanes_of(Priority.DEFAULT))
TAKEOVERS = 10
CLAIMS = 200
UPKEEPS = 3
UPKEEP = "CALL outbox.maintain()"
REMOVE = """
WITH gone AS (
    DELETE FROM outbox.message
     WHERE topic = 'live' AND created_at >= now() - interval '1 hour'
)
DELETE FROM outbox.position WHERE settled_at >= %s
"""
ADD = """
INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
SELECT id, outbox.lane_of(key, id), 'live', key, 'text/plain',
       convert_to(repeat('x', 300), 'UTF8')
  FROM (SELECT outbox.uuid7() AS id, 'order-' || number %% 1000 AS key
          FROM generate_series(1, %s) AS number) AS row
"""
TODAY = """
SELECT string_agg(today.partition::text, ', ')
  FROM unnest(ARRAY['outbox.message', 'outbox.position']) AS parent,
       outbox.partitions(parent) AS today
 WHERE today.starts_at <= now() AND now() < today.ends_at
"""


class LiveBatch:
    """Ready messages in a database; each step returns its mean time in milliseconds."""

    def __init__(self, url: str, messages: int) -> None:
        self._messages = messages
        self._runner = asyncio.Runner()
        self._session = psycopg.connect(conninfo(url), autocommit=True)
        self._connection = self._runner.run(
            connect(url, application_name="benchmark", settings=SETTINGS)
        )
        self._lease = Lease(
            url,
            lock_class=0,
            groups=[],
            limit=CONFIG.lease,
            application_name="benchmark",
        )
        self._since = self._value("SELECT clock_timestamp()")
        self._add_again()

    def close(self) -> None:
        """End the sessions."""
        self._runner.run(self._connection.close())
        self._runner.close()
        self._session.close()

    def claim(self) -> float:
        """Claim all messages, a full batch at a time, as one relay with all lanes."""

        async def claim() -> tuple[float, int]:
            # The first one takes the lanes over.
            _, *claims = [seconds async for seconds, _ in self._claims()]
            return sum(claims), len(claims)

        seconds, claims = self._runner.run(claim())
        return seconds * 1_000 / claims

    def claim_nothing(self) -> float:
        """Claim when nothing is ready; the takeover comes before."""

        async def claim() -> float:
            board, lanes = self._board()
            await claim_batch(self._connection, board, lanes, CONFIG)
            started = time.perf_counter()
            for _ in range(CLAIMS):
                batch = await claim_batch(self._connection, board, lanes, CONFIG)
                assert not batch.rows
            return time.perf_counter() - started

        return self._runner.run(claim()) * 1_000 / CLAIMS

    def take_over(self) -> float:
        """Read the positions, and find the first messages that they don't cover."""

        async def take_over() -> None:
            board, lanes = self._board()
            clock = await board.reader.takeover.read_clock(self._connection)
            async with self._connection.transaction():
                await self._connection.execute(
                    "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
                )
                await board.reader.takeover.refresh(self._connection, lanes, clock)

        started = time.perf_counter()
        for _ in range(TAKEOVERS):
            self._runner.run(take_over())
        return (time.perf_counter() - started) * 1_000 / TAKEOVERS

    def upkeep(self) -> float:
        """Run pg_cron's job in an hour with nothing to create or drop."""
        started = time.perf_counter()
        for _ in range(UPKEEPS):
            self._session.execute(UPKEEP)
        return (time.perf_counter() - started) * 1_000 / UPKEEPS

    def settle(self) -> float:
        """Settle all messages, batch by batch, and replace them with new ones."""

        async def settle() -> tuple[float, int]:
            settlements = [s async for _, s in self._claims()]
            started = time.perf_counter()
            for settlement in settlements:
                await store_settlement(self._connection, self._reader, settlement)
            settled = sum(settlement.published for settlement in settlements)
            assert settled == self._messages, f"{settled} of {self._messages} settled"
            return time.perf_counter() - started, len(settlements)

        seconds, batches = self._runner.run(settle())
        self._add_again()
        return seconds * 1_000 / batches

    async def _claims(self) -> AsyncIterator[tuple[float, Settlement]]:
        """Yield how long each claim took, and what settles it."""
        board, lanes = self._board()
        while True:
            started = time.perf_counter()
            batch = await claim_batch(self._connection, board, lanes, CONFIG)
            seconds = time.perf_counter() - started
            if not batch.rows:
                return
            answers = [Acked()] * len(batch.rows)
            settlement = settle(batch, answers, CONFIG.retry)
            settlement.tell_lanes({}, time.monotonic())
            yield seconds, settlement

    def _board(self) -> tuple[LaneBoard, Sequence[Lane]]:
        board = LaneBoard(self._lease, CONFIG.concurrency)
        board.take(LANES)
        self._reader = board.reader
        return board, [lane for n in LANES if (lane := board.find(n)) is not None]

    def _add_again(self) -> None:
        self._session.execute(REMOVE, (self._since,))
        today: str = self._value(TODAY)
        self._session.execute(f"VACUUM {today}".encode())
        self._session.execute(ADD, (self._messages,))
        self._session.execute(f"ANALYZE {today}".encode())

    def _value(self, query: str) -> Any:
        found = self._session.execute(query.encode()).fetchone()
        assert found is not None
        return found[0]
