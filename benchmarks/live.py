"""Messages of now, claimed and settled again and again by the relay's own statements.

Without its process, which would hide in its own work what the server does more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

import psycopg

from outbox.lane import Priority, lanes_of
from outbox.limits import (
    MAX_CONTENT_TYPE_BYTES,
    MAX_HEADERS_BYTES,
    MAX_INDEXED_BYTES,
    MAX_TENANT_BYTES,
)
from outbox.postgres.connection import conninfo
from outbox.postgres.sql_files import load
from relay.config import RelayConfig
from relay.lanes.lane import SKEW

LIMITS = RelayConfig()
LANES = tuple(lanes_of(Priority.DEFAULT))
SWEEPS = 10
UPKEEPS = 3
UPKEEP = "CALL outbox.maintain(patience => '6 hours')"
REMOVE = "DELETE FROM outbox.message WHERE topic = 'live' AND created_at >= %s"
ADD = """
INSERT INTO outbox.message (id, lane, topic, key, content_type, payload)
SELECT id, outbox.lane_of(key, id), 'live', key, 'text/plain',
       convert_to(repeat('x', 300), 'UTF8')
  FROM (SELECT outbox.uuid7() AS id, 'order-' || number %% 1000 AS key
          FROM generate_series(1, %s) AS number) AS row
"""
FLOOR = """
SELECT min(seq) - 1 FROM outbox.message WHERE topic = 'live' AND created_at >= %s
"""
TODAY = """
SELECT partition::text FROM outbox.partitions('outbox.message')
 WHERE starts_at <= now() AND now() < ends_at
"""


class LiveBatch:
    """Ready messages in a database; each method gives a mean in milliseconds."""

    def __init__(self, url: str, messages: int) -> None:
        self._messages = messages
        self._connection = psycopg.connect(conninfo(url), autocommit=True)
        self._connection.execute("SET synchronous_commit = off")
        self._add_again()

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def claim(self) -> float:
        """Claim all messages, a full batch at a time, as one relay with all lanes."""
        started = time.perf_counter()
        claims = sum(1 for _ in self._claims())
        return (time.perf_counter() - started) * 1_000 / claims

    def find_heads(self) -> float:
        """Look for the first message of each lane on every day, as a sweep does."""
        values = {"lanes": list(LANES), "blocked": []}
        started = time.perf_counter()
        for _ in range(SWEEPS):
            self._connection.execute(load("relay", "find_heads"), values)
        return (time.perf_counter() - started) * 1_000 / SWEEPS

    def upkeep(self) -> float:
        """Run pg_cron's job in an hour in which there is nothing to make or to drop."""
        started = time.perf_counter()
        for _ in range(UPKEEPS):
            self._connection.execute(UPKEEP)
        return (time.perf_counter() - started) * 1_000 / UPKEEPS

    def settle(self) -> float:
        """Settle all messages, batch by batch, and put new ones in their place."""
        batches = [
            {
                "ids": [row[2] for row in rows],
                "first": min(row[3] for row in rows),
                "last": max(row[3] for row in rows),
            }
            for rows in self._claims()
        ]
        settled = 0
        started = time.perf_counter()
        for batch in batches:
            settled += self._connection.execute(
                load("relay", "mark_published"), batch, binary=True
            ).rowcount
        taken = time.perf_counter() - started
        assert settled == self._messages, f"{settled} of {self._messages} settled"
        self._add_again()
        return taken * 1_000 / len(batches)

    def _claims(self) -> Iterator[Sequence[Any]]:
        floors = dict.fromkeys(LANES, self._floor)
        cursor = self._connection.cursor(binary=True)
        while True:
            values = {
                "lanes": list(floors),
                "floors": list(floors.values()),
                "oldest": self._since,
                "newest": self._since + 2 * SKEW,
                "blocked": [],
                "only": None,
                "max_rows": LIMITS.batch_size,
                "aside": [],
                "max_bytes": LIMITS.max_batch_bytes,
                "max_indexed": MAX_INDEXED_BYTES,
                "max_tenant": MAX_TENANT_BYTES,
                "max_content_type": MAX_CONTENT_TYPE_BYTES,
                "max_headers": MAX_HEADERS_BYTES,
                "max_payload": LIMITS.max_payload_bytes,
                "max_copied": 1024 * 1024,
            }
            rows = cursor.execute(load("relay", "claim_batch"), values).fetchall()
            if not rows:
                return
            yield rows
            floors |= {row[0]: row[1] for row in rows}

    def _add_again(self) -> None:
        self._since: datetime = self._value("SELECT now()") - SKEW
        self._connection.execute(REMOVE, (self._since,))
        today: str = self._value(TODAY)
        self._connection.execute(f"VACUUM {today}".encode())
        self._connection.execute(ADD, (self._messages,))
        self._connection.execute(f"ANALYZE {today}".encode())
        self._floor: int = self._value(FLOOR, self._since)

    def _value(self, query: str, *parameters: object) -> Any:
        found = self._connection.execute(query.encode(), parameters or None).fetchone()
        assert found is not None
        return found[0]
