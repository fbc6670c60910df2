"""Past partitions: created by pg_partman, filled on the server, vacuumed."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import psycopg

from benchmarks.workload import TOPIC

# As the owner, since the upkeep can't drop partitions that another role owns.
MAKE_DAYS = """
SELECT partman.create_partition_time(
    p_parent_table := %(parent)s,
    p_partition_times := (
        SELECT array_agg(date_trunc('day', now(), 'UTC') - day * interval '1 day')
          FROM generate_series(%(newest)s::int, %(oldest)s::int) AS day))
"""
DAYS = """
SELECT partition::text, starts_at, least(ends_at, now())
  FROM outbox.partitions(%s) WHERE starts_at <= now() ORDER BY starts_at DESC
"""
MAKE_DAYS_OF_FOLLOWERS = """
SELECT outbox.make_partitions(parent_table)
  FROM outbox.partition_policy WHERE follows = %s
"""
# Moments spread over the day, each with the UUIDv7 a writer would have generated.
ROWS = """
  FROM (SELECT number, moment,
               (lpad(to_hex(floor(extract(epoch FROM moment) * 1000)::bigint), 12, '0')
                || '7' || left(hash, 3) || '8' || substr(hash, 4, 15))::uuid AS id
          FROM generate_series(1, %(rows)s) AS number,
               LATERAL (SELECT %(begin)s::timestamptz + number * %(step)s::interval,
                               md5(number::text)) AS made (moment, hash)
       ) AS row
"""
MESSAGES = """
INSERT INTO {table}
       (id, created_at, seq, lane, topic, key, content_type, payload)
SELECT id, moment, nextval('outbox.message_seq'), 16 + number %% 16, %(topic)s,
       'order-' || number %% 1000, 'application/json',
       convert_to(rpad('{{"order_id":' || number || ',"note":"',
                       %(payload_bytes)s - 2, 'x') || '"}}', 'UTF8')
"""
# The positions that a relay stores for batches of 500.
SETTLE = """
INSERT INTO outbox.position (created_at, ends_at, settled_at, number, up_to, messages,
                             lane, reader, snapshot)
SELECT %(begin)s, %(end)s, max(created_at), max(seq), max(seq), count(*), lane, 'main',
       pg_current_snapshot()
  FROM outbox.message
 WHERE created_at >= %(begin)s AND created_at < %(end)s AND seq > %(last)s
 GROUP BY lane, (seq - %(last)s) / 500
"""
POSITIONS_OF_DAY = """
SELECT partition::text FROM outbox.partitions('outbox.position') WHERE starts_at = %s
"""
LAST_SEQ = "SELECT last_value - (NOT is_called)::int FROM outbox.message_seq"
RECEIPTS = """
INSERT INTO {table} (message_id, message_at, consumer)
SELECT id, inbox.moment_of(id), 'benchmark'
"""


class Day(NamedTuple):
    """A partition that has begun; part of it may lie in the future."""

    partition: str
    begin: datetime
    end: datetime


def make_days(
    connection: psycopg.Connection[Any], parent: str, *, newest: int, oldest: int
) -> None:
    """Create the partitions from `newest` to `oldest` days ago."""
    connection.execute("SET timezone = 'UTC'")
    connection.execute("SET ROLE pillarbox_owner")
    connection.execute(
        MAKE_DAYS, {"parent": parent, "newest": newest, "oldest": oldest}
    )
    connection.execute(MAKE_DAYS_OF_FOLLOWERS, (parent,))
    connection.execute("RESET ROLE")


def days_of(connection: psycopg.Connection[Any], parent: str) -> list[Day]:
    """Return today and the days before it, newest first."""
    return [Day(*row) for row in connection.execute(DAYS, (parent,))]


def fill_messages(
    connection: psycopg.Connection[Any],
    day: Day,
    rows: int,
    *,
    table: str | None = None,
    settled: bool = True,
    payload_bytes: int = 100,
) -> None:
    """Add messages of a day to its partition, or to another table like it.

    Args:
        settled: whether they are published; those of another table are not.
    """
    last = connection.execute(LAST_SEQ).fetchone()
    assert last is not None
    values: dict[str, object] = {"topic": TOPIC, "payload_bytes": payload_bytes}
    _fill(connection, MESSAGES, table or day.partition, day, rows, values)
    if settled and table is None:
        connection.execute(
            SETTLE, {"begin": day.begin, "end": day.end, "last": last[0]}
        )
        written = connection.execute(POSITIONS_OF_DAY, (day.begin,)).fetchone()
        assert written is not None
        connection.execute(f"VACUUM (ANALYZE) {written[0]}".encode())


def fill_receipts(connection: psycopg.Connection[Any], day: Day, rows: int) -> None:
    """Add the receipts of messages of a day to its partition."""
    _fill(connection, RECEIPTS, day.partition, day, rows, {})


def _fill(
    connection: psycopg.Connection[Any],
    insert: str,
    table: str,
    day: Day,
    rows: int,
    values: dict[str, object],
) -> None:
    step = (day.end - day.begin) // (rows + 1)
    connection.execute("SET synchronous_commit = off")
    connection.execute(
        (insert + ROWS).format(table=table).encode(),
        {"rows": rows, "begin": day.begin, "step": step, **values},
    )
    connection.execute(f"VACUUM (ANALYZE) {table}".encode())
