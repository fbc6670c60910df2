"""How long reading the life of a message takes, with 90 days and 10 million messages.

It is read as `pillarbox trace` reads it: as the monitor, in a new session. Starting the
process is left out, since that is the same for every command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Final
from uuid import UUID

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.history import days_of, make_days
from benchmarks.measure import Answer, Variant, at_most, measure
from benchmarks.scale import Size, database
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.observability.message_life import (
    Databases,
    Found,
    read_lives_of_key,
    read_trace,
)

TARGET: Final = 100
NOWHERE: Final = "by a random id, which no day has"
DAY: Final = timedelta(days=1)
OF_CONSUMERS: Final = ("inbox.job", "inbox.suspect")
ADD_CONSUMER = """
WITH added AS (
    INSERT INTO outbox.reader (reader, broker) VALUES ('benchmark', 'direct')
    RETURNING reader
)
INSERT INTO outbox.subscription (reader, topic, since, since_seq)
SELECT reader, '*', '1:1:', -1 FROM added
"""
# It has handled each message of a day.
HANDLE = """
INSERT INTO outbox.position (created_at, ends_at, number, up_to, messages, lane, reader,
                             snapshot, next_xid)
SELECT %(begin)s, %(end)s, max(seq), max(seq), count(*), lane, 'benchmark',
       pg_current_snapshot(), pg_snapshot_xmax(pg_current_snapshot())
  FROM outbox.message
 WHERE created_at >= %(begin)s AND created_at < %(end)s
 GROUP BY lane, seq / 8000
"""
DEAD_LETTERS = """
INSERT INTO inbox.dead_letter (origin, message_id, topic, attempts, schema_version,
                               content_type, headers, payload, error_reason)
SELECT 'consumer:benchmark', outbox.uuid7()::text, 't', 1, 1, 'text/plain', '{}', '',
       'why'
  FROM generate_series(1, 10000)
"""
CHOOSE = """
SELECT id FROM outbox.message
 WHERE created_at >= %s AND created_at < %s AND seq %% 10 = 0
 ORDER BY created_at LIMIT 1
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    live = conditions.size(100_000, quick=10_000)
    many = Size(partitions=90, rows=conditions.size(10_000_000, quick=100_000))
    few = Size(partitions=8, rows=live)
    with database(conditions, many, few) as url:
        newest, oldest = prepare(url)
        questions: dict[str, Callable[[], float]] = {
            "by id, of the oldest day": by_id(url, oldest),
            "by id, of yesterday": by_id(url, newest),
            NOWHERE: by_id(url, None),
            "by key, 2 days": by_key(url, 2 * DAY),
        }
        for question, run in questions.items():
            found = measure(
                Variant(label=question, run=run),
                runs=conditions.runs(15),
                on_run=lambda label, figure: show(label, figure, "ms"),
            )
            yield Answer(
                question=f"trace {question}",
                figure=found.median,
                unit="ms",
                target=None if question == NOWHERE else at_most(TARGET),
                noise=found.noise,
                detail=f"{many.rows:,} messages in {many.partitions} partitions, a "
                "new session for each",
            )


def prepare(url: str) -> tuple[str, str]:
    """Add a consumer and dead letters; return ids of yesterday and the oldest day."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        connection.execute("SET jit = off")
        days = days_of(connection, "outbox.message")
        for parent in OF_CONSUMERS:
            make_days(connection, parent, newest=1, oldest=len(days) - 1)
        connection.execute(ADD_CONSUMER)
        for day in days:
            connection.execute(HANDLE, {"begin": day.begin, "end": day.end})
        connection.execute(DEAD_LETTERS)
        connection.execute("VACUUM (ANALYZE) outbox.position")
        connection.execute("ANALYZE inbox.dead_letter")
        chosen = []
        for day in (days[1], days[-1]):
            row = connection.execute(CHOOSE, (day.begin, day.end)).fetchone()
            assert row is not None
            chosen.append(str(row[0]))
    return chosen[0], chosen[1]


def by_id(url: str, id: str | None) -> Callable[[], float]:
    """Read one life; if `id` is None, look up an id that no message has."""

    def run() -> float:
        with reading(url) as session:
            began = time.perf_counter()
            found = read_trace(
                session, UUID(id or "8f14e45f-ceea-467f-9575-30a1c8b1d9a2")
            )
            spent = time.perf_counter() - began
        assert (found.found is Found.FOUND) == (id is not None)
        if id is not None:
            assert {"published", "handled"} <= {it.what for it in found.life.steps}
        return spent * 1_000

    return run


def by_key(url: str, within: timedelta) -> Callable[[], float]:
    """Read the lives of the newest messages of a key."""

    def run() -> float:
        with reading(url) as session:
            began = time.perf_counter()
            read_lives_of_key(
                session, "order-7", since=datetime.now(UTC) - within, max_messages=20
            )
            return (time.perf_counter() - began) * 1_000

    return run


@contextmanager
def reading(url: str) -> Iterator[Databases]:
    """Open a new session with the monitor's privileges."""
    with administration(url, application_name="pillarbox trace") as connection:
        connection.execute("SET ROLE pillarbox_monitor")
        yield {"shop": connection}
