"""How long other tenants wait while one has a million blocked keys."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, at_most
from benchmarks.others import watch

LONGEST_WAIT = 1.0
MOST_MIB = 256.0
# Each key has a refused message that waits, one in ten has another behind it.
FILL = """
INSERT INTO outbox.message (id, lane, topic, key, tenant, content_type, payload, attempts, available_at)
SELECT outbox.uuid7(), 16 + n %% 16, 'blocked', 'k' || n, 'noisy', 'text/plain', '', i,
       CASE WHEN i = 1 THEN now() + CAST(%(due)s AS interval) END
  FROM generate_series(1, %(keys)s) AS n, generate_series(1, 0, -1) AS i
 WHERE i = 1 OR n %% 10 = 0
"""  # noqa: E501


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
        connection.execute(FILL, {"keys": keys, "due": due})
        connection.execute("VACUUM ANALYZE outbox.message")
