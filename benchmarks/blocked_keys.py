"""How long other tenants wait while one has a million blocked keys."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, at_most
from benchmarks.others import watch

LONGEST_WAIT = 1.0
MOST_MIB = 256.0
# A refused message waits in each key; in one key in ten, another waits behind it.
FILL = """
INSERT INTO outbox.message (id, lane, topic, key, tenant, content_type, payload)
SELECT outbox.uuid7(), 16 + n %% 16, CASE i WHEN 1 THEN 'head' ELSE 'behind' END,
       'k' || n, 'noisy', 'text/plain', ''
  FROM generate_series(1, %(keys)s) AS n, generate_series(1, 0, -1) AS i
 WHERE i = 1 OR n %% 10 = 0
"""
SETTLE = """
INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, deferred,
                             lane, reader, snapshot)
SELECT day, day + interval '24 hours', 1, max(seq), count(*), count(*), lane, 'main',
       pg_current_snapshot()
  FROM (SELECT date_trunc('day', created_at, 'UTC') AS day, lane, seq
          FROM outbox.message) AS of_day
 GROUP BY day, lane
"""
DEFER = """
INSERT INTO outbox.deferral
       (created_at, due_at, seq, id, attempts, lane, cause, key, reason)
SELECT created_at, now() + CAST(%(due)s AS interval), seq, id, 1, lane, 'refused', key,
       'no'
  FROM outbox.message WHERE topic = 'head'
"""
BLOCK = """
INSERT INTO outbox.deferral (created_at, seq, id, lane, cause, key)
SELECT created_at, seq, id, lane, 'blocked', key
  FROM outbox.message WHERE topic = 'behind'
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    keys = conditions.size(1_000_000, quick=50_000)
    seconds = conditions.size(60, quick=10)
    for label, due in (("wait", "6 hours"), ("are due all at once", "0 s")):
        with conditions.migrated_database() as url:
            fill(url, keys, due)
            found = watch(url, seconds)
        show(f"{keys:,} keys that {label}", found.longest, "s")
        detail = (
            f"{found.messages:,} messages of others, median {found.middle:.3f} s; "
            f"{found.not_others:,} of these keys published meanwhile"
        )
        yield Answer(
            question=f"longest wait beside {keys:,} blocked keys that {label}",
            figure=found.longest,
            unit=" s",
            target=at_most(LONGEST_WAIT),
            detail=detail,
        )
        yield Answer(
            question=f"memory of that relay, {label}",
            figure=found.peak_mib,
            unit=" MiB",
            target=at_most(MOST_MIB),
            detail="resident memory at its highest",
        )


def fill(url: str, keys: int, due: str) -> None:
    """Add the blocked keys, and vacuum as autovacuum would."""
    with psycopg.connect(url, autocommit=True) as connection:
        with connection.transaction():
            connection.execute(FILL, {"keys": keys})
            connection.execute(SETTLE)
            connection.execute(DEFER, {"due": due})
            connection.execute(BLOCK)
        connection.execute(
            "VACUUM ANALYZE outbox.message, outbox.position, outbox.deferral"
        )
