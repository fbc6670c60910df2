"""Recent messages, claimed and settled repeatedly by the relay's own statements.

No relay runs, because its own work would mask any additional work of the server.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import accumulate, groupby
from typing import Any, NamedTuple
from uuid import UUID

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
from relay.claim import bin_of
from relay.config import RelayConfig
from relay.lanes.lane import SKEW
from relay.relay import WORKER_SETTINGS

LIMITS = RelayConfig()
LANES = tuple(lanes_of(Priority.DEFAULT))
SWEEPS = 10
UP_TO = 4096
UPKEEPS = 3
UPKEEP = "CALL outbox.maintain(patience => '6 hours')"
REMOVE = """
WITH gone AS (
    DELETE FROM outbox.message WHERE topic = 'live' AND created_at >= %(since)s
    RETURNING id
)
DELETE FROM outbox.settlement
 WHERE created_at >= date_bin('15 minutes', %(since)s, '2000-01-01 00:00:00+00')
   AND ids && ARRAY(SELECT id FROM gone)
"""
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
SELECT string_agg(today.partition::text, ', ')
  FROM unnest(ARRAY['outbox.message', 'outbox.settlement']) AS parent,
       outbox.partitions(parent) AS today
 WHERE today.starts_at <= now() AND now() < today.ends_at
"""


class Row(NamedTuple):
    """The position of a message."""

    lane: int
    seq: int
    id: UUID
    created_at: datetime


def marks_of(rows: Iterable[Row]) -> dict[str, list[Any]]:
    """Return the parameters of `mark_settled.sql`, grouped as a relay groups them."""

    def group_of(row: Row) -> tuple[int, datetime, int]:
        return row.lane, bin_of(row.created_at), row.seq // 4096

    groups = [
        (lane, bin, list(members))
        for (lane, bin, _), members in groupby(
            sorted(rows, key=lambda row: (group_of(row), row.seq)), key=group_of
        )
    ]
    ends = list(accumulate(len(members) for _, _, members in groups))
    return {
        "ids": [row.id for _, _, members in groups for row in members],
        "bins": [bin for _, bin, _ in groups],
        "lanes": [lane for lane, _, _ in groups],
        "first_seqs": [members[0].seq for _, _, members in groups],
        "last_seqs": [members[-1].seq for _, _, members in groups],
        "outcomes": ["published"] * len(groups),
        "starts": [1, *(end + 1 for end in ends[:-1])],
        "ends": ends,
    }


class LiveBatch:
    """Ready messages in a database; each step returns its mean time in milliseconds."""

    def __init__(self, url: str, messages: int) -> None:
        self._messages = messages
        self._connection = psycopg.connect(conninfo(url), autocommit=True)
        for name, setting in WORKER_SETTINGS.items():
            self._connection.execute(
                "SELECT set_config(%s, %s, false)", (name, setting)
            )
        self._add_again()

    def close(self) -> None:
        """End the session."""
        self._connection.close()

    def claim(self) -> float:
        """Claim all messages, a full batch at a time, as one relay with all lanes."""
        started = time.perf_counter()
        claims = sum(1 for _ in self._claims())
        return (time.perf_counter() - started) * 1_000 / claims

    def take_over(self) -> float:
        """Read the watermarks, and find the first unmarked messages above them."""
        lanes = {"lanes": list(LANES)}
        started = time.perf_counter()
        for _ in range(SWEEPS):
            found = self._connection.execute(
                load("relay", "read_watermarks"), {**lanes, "drawn": 2**62}
            ).fetchall()
            aboves: dict[int, int] = dict(found)
            self._connection.execute(
                load("relay", "find_unmarked"),
                {
                    **lanes,
                    "aboves": [aboves[lane] for lane in LANES],
                    "up_tos": [aboves[lane] + UP_TO for lane in LANES],
                },
            )
        return (time.perf_counter() - started) * 1_000 / SWEEPS

    def upkeep(self) -> float:
        """Run pg_cron's job in an hour with nothing to create or drop."""
        started = time.perf_counter()
        for _ in range(UPKEEPS):
            self._connection.execute(UPKEEP)
        return (time.perf_counter() - started) * 1_000 / UPKEEPS

    def settle(self) -> float:
        """Settle all messages, batch by batch, and replace them with new ones."""
        batches = [marks_of(Row(*row[:4]) for row in rows) for rows in self._claims()]
        started = time.perf_counter()
        for batch in batches:
            self._connection.execute(load("relay", "mark_settled"), batch, binary=True)
        taken = time.perf_counter() - started
        settled = sum(len(batch["ids"]) for batch in batches)
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
                "oldest": bin_of(self._since),
                "newest": self._since + 2 * SKEW,
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
        self._connection.execute(REMOVE, {"since": self._since})
        today: str = self._value(TODAY)
        self._connection.execute(f"VACUUM {today}".encode())
        self._connection.execute(ADD, (self._messages,))
        self._connection.execute(f"ANALYZE {today}".encode())
        self._floor: int = self._value(FLOOR, self._since)

    def _value(self, query: str, *parameters: object) -> Any:
        found = self._connection.execute(query.encode(), parameters or None).fetchone()
        assert found is not None
        return found[0]
