"""The disk space of a million messages, and the cost and result of their removal.

It is compared with the same table without partitions, where an UPDATE settles a message
and old rows are deleted. Newer rows stay in both, as in a table that is in use. They
are at the end of the file, so VACUUM can't truncate it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.history import Day, days_of, fill_messages, make_days
from benchmarks.measure import Answer, quantity
from benchmarks.stall import value
from pillarbox.outbox.administration.upkeep import APPLICATION_NAME, maintain
from pillarbox.outbox.postgres.sql_files import load

MIB = 1 << 20
PAYLOAD_BYTES = 300
EXPIRED = 20
BATCH = 500
NOTHING = UUID(int=0)
DELETED_AT_ONCE = 10_000
PLAIN = "outbox.plain_message"
# The partitions' autovacuum_vacuum_scale_factor; this benchmark runs VACUUM itself.
VACUUM_AFTER = 0.02

MAKE_PLAIN = f"""
CREATE TABLE {PLAIN} (LIKE outbox.message INCLUDING ALL, published_at timestamptz)
"""
MARK_PLAIN = f"""
UPDATE {PLAIN} SET published_at = clock_timestamp() WHERE id = ANY (%(ids)s)
"""
NO_AUTOVACUUM = "ALTER TABLE {} SET (autovacuum_enabled = off)"
NEXT = "SELECT lane, seq, id FROM {} WHERE id > %s ORDER BY id LIMIT %s"
DELETE_NEXT = f"""
WITH gone AS (
    DELETE FROM {PLAIN} WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {PLAIN} WHERE id > %s AND created_at < %s
         ORDER BY id LIMIT %s))
    RETURNING id
)
SELECT id FROM gone ORDER BY id DESC LIMIT 1
"""
SIZE = """
WITH parent (table_id) AS (
    SELECT '{0}'::regclass
     UNION ALL
    SELECT parent_table::regclass FROM outbox.partition_policy WHERE follows = '{0}'
)
SELECT sum(pg_total_relation_size(table_id))
  FROM (SELECT table_id FROM parent
         UNION ALL
        SELECT i.inhrelid FROM pg_inherits i JOIN parent ON i.inhparent = table_id
       ) AS parents_and_partitions (table_id)
"""
OWN_SIZE = "SELECT pg_total_relation_size('{}')"
WRITTEN = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
COUNT = "SELECT count(*) FROM {}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one design used: seconds, and bytes for everything else."""

    live: int
    settled: int
    left: int
    wal: int
    seconds: float


def answers(conditions: Conditions) -> Iterator[Answer]:
    messages = conditions.size(1_000_000, quick=20_000)
    with (
        conditions.migrated_database() as url,
        psycopg.connect(
            url, autocommit=True, application_name=APPLICATION_NAME
        ) as connection,
    ):
        make_days(connection, "outbox.message", newest=EXPIRED, oldest=EXPIRED)
        today, *_, expired = days_of(connection, "outbox.message")
        connection.execute(MAKE_PLAIN)
        for table in (today.partition, expired.partition, PLAIN):
            connection.execute(NO_AUTOVACUUM.format(table).encode())
        dropped, deleted = (
            Design(connection, table).taken(expired, today, messages)
            for table in ("outbox.message", PLAIN)
        )
    for what, drop, delete in (
        ("live", dropped.live, deleted.live),
        ("settled", dropped.settled, deleted.settled),
        ("left when dropped", dropped.left, deleted.left),
        ("WAL of the drop", dropped.wal, deleted.wal),
    ):
        show(what, drop / MIB, "MiB")
        yield Answer(
            question=f"disk: {messages:,} messages, {what}",
            figure=drop / MIB,
            unit="MiB",
            detail=f"payloads of {PAYLOAD_BYTES} bytes: {quantity(drop / MIB, 'MiB')}, "
            f"in a table whose rows are deleted {quantity(delete / MIB, 'MiB')}",
        )
    yield Answer(
        question=f"disk: {messages:,} messages, time of the drop",
        figure=dropped.seconds,
        unit="s",
        detail=f"all of the upkeep {quantity(dropped.seconds, 's')}, DELETE of "
        f"{DELETED_AT_ONCE:,} at once and VACUUM {quantity(deleted.seconds, 's')}",
    )


class Design:
    """A way to keep messages: partitions that are dropped, or rows that are deleted."""

    def __init__(self, connection: psycopg.Connection[Any], table: str) -> None:
        self._connection = connection
        self._table = table
        self._plain = table == PLAIN
        self._numbers: Counter[int] = Counter()

    def taken(self, old: Day, today: Day, messages: int) -> Taken:
        """Fill, settle and remove an old day; a tenth as many rows of today stay."""
        staying = messages // 10
        own = PLAIN if self._plain else old.partition
        before = self._size() - self._value(OWN_SIZE.format(own))
        self._fill(old, messages, settled=False)
        live = self._size() - before
        self._settle(old, messages)
        settled = self._size() - before
        self._fill(today, staying, settled=True)
        filled = self._size()
        # In a table this old, all pages would have been written out long ago.
        self._connection.execute("CHECKPOINT")
        wal, started = self._value(WRITTEN), time.perf_counter()
        if self._plain:
            self._delete(today.begin)
        else:
            maintain(self._connection, report=lambda _: None)
        seconds = time.perf_counter() - started
        wal = self._value(WRITTEN) - wal
        rows = self._value(COUNT.format(self._table))
        assert rows == staying, f"{rows} rows are left, not {staying}"
        return Taken(
            live=live,
            settled=settled,
            left=self._size() - (filled - settled),
            wal=int(wal),
            seconds=seconds,
        )

    def _fill(self, day: Day, messages: int, *, settled: bool) -> None:
        fill_messages(
            self._connection,
            day,
            messages,
            table=PLAIN if self._plain else None,
            settled=settled,
            payload_bytes=PAYLOAD_BYTES,
        )

    def _settle(self, day: Day, messages: int) -> None:
        """Settle as a relay does; run VACUUM as often as the settings require."""
        table = PLAIN if self._plain else day.partition
        mark = MARK_PLAIN if self._plain else load("outbox.log", "store_positions")
        last = NOTHING
        until_vacuum = round(messages * VACUUM_AFTER)
        while rows := self._connection.execute(
            NEXT.format(table).encode(), (last, until_vacuum)
        ).fetchall():
            for batch in batches(rows):
                self._connection.execute(
                    mark.encode(),
                    {"ids": [id for *_, id in batch]}
                    if self._plain
                    else self._positions(day, batch),
                )
            last = rows[-1][2]
            if self._plain:
                self._connection.execute(f"VACUUM {table}".encode())

    def _positions(self, day: Day, batch: Sequence[Any]) -> dict[str, object]:
        """Return what a relay stores of a batch."""
        lanes = Counter(lane for lane, *_ in batch)
        tops = {lane: seq for lane, seq, _ in batch}
        self._numbers.update(lanes.keys())
        snapshot = self._value("SELECT pg_current_snapshot()::text")
        count = len(lanes)
        return {
            "reader": "main",
            "starts": [day.begin] * count,
            "ends": [day.end] * count,
            "lanes": list(lanes),
            "numbers": [self._numbers[lane] for lane in lanes],
            "up_tos": [tops[lane] for lane in lanes],
            "snapshots": [snapshot] * count,
            "late_up_tos": [None] * count,
            "late_snapshots": [None] * count,
            "messages": list(lanes.values()),
            "deferred": [0] * count,
            "next_xids": [snapshot.split(":")[1]] * count,
        }

    def _delete(self, before: datetime) -> None:
        last = NOTHING
        while gone := self._connection.execute(
            DELETE_NEXT.encode(), (last, before, DELETED_AT_ONCE)
        ).fetchone():
            (last,) = gone
        self._connection.execute(f"VACUUM {PLAIN}".encode())

    def _size(self) -> int:
        return int(self._value(SIZE.format(self._table)))

    def _value(self, query: str) -> Any:
        return value(self._connection, query)


def batches(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Split rows into batches, as a relay claims them."""
    for first in range(0, len(rows), BATCH):
        yield rows[first : first + BATCH]
