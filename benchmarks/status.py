"""How long `pillarbox status` takes, with 90 days and 10 million messages.

It measures as the monitor, in a new session, or in one that has measured before, as
with --watch; without a consumer that reads the outbox, and with one. Starting the
process is left out, since that is the same for every command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.history import days_of, fill_messages
from benchmarks.measure import Answer, Variant, at_most, measure
from benchmarks.scale import Size, database
from pillarbox.outbox.administration.connection import (
    AdministrationConnection,
    administration,
)
from pillarbox.outbox.administration.doctor import examine_quickly
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS

TARGET: Final = 200
LANES = "SELECT pg_advisory_lock(%s, lane) FROM generate_series(0, 47) AS lane"
# One message in 200 was scheduled, and published when it was due.
LOG = """
INSERT INTO outbox.deferral (created_at, seq, id, lane, cause, due_at, outcome)
SELECT m.created_at, m.seq, m.id, m.lane, e.cause,
       CASE WHEN e.cause = 'scheduled' THEN m.created_at END,
       CASE WHEN e.cause = 'settled' THEN 'published' END
  FROM outbox.message AS m, unnest(ARRAY['scheduled', 'settled']) AS e (cause)
 WHERE m.created_at >= %(begin)s AND m.created_at < %(end)s AND m.seq %% 200 = 0
"""
DEAD_LETTERS = """
INSERT INTO inbox.dead_letter (origin, message_id, topic, attempts, schema_version,
                               content_type, headers, payload, error_reason)
SELECT 'consumer:benchmark', outbox.uuid7()::text, 't', 1, 1, 'text/plain', '{}', '',
       'reason ' || n % 20
  FROM generate_series(1, 10000) AS n
"""


def answers(conditions: Conditions) -> Iterator[Answer]:
    few = Size(partitions=8, rows=conditions.size(100_000, quick=10_000))
    many = Size(partitions=90, rows=conditions.size(10_000_000, quick=100_000))
    waiting = conditions.size(5_000, quick=500)
    with database(conditions, many, few) as url:
        prepare(url, waiting)
        questions: dict[str, Callable[[], float]] = {
            "a new session": in_new_session(url, waiting),
            "a new session, no relay": in_new_session(url, waiting, relay=False),
            "the same session again": in_same_session(url, waiting),
            "a new session, with a consumer": in_new_session(url, waiting),
        }
        for question, run in questions.items():
            if "consumer" in question:
                subscribe(url)
            found = measure(
                Variant(label=question, run=run),
                runs=conditions.runs(15),
                on_run=lambda label, figure: show(label, figure, "ms"),
            )
            yield Answer(
                question=f"status: {question}",
                figure=found.median,
                unit="ms",
                target=None if "no relay" in question else at_most(TARGET),
                noise=found.noise,
                detail=f"{many.rows:,} messages in {many.partitions} partitions,"
                f" {waiting:,} wait",
            )


def prepare(url: str, waiting: int) -> None:
    """Add scheduled messages, waiting messages, and dead letters."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        connection.execute("SET jit = off")
        days = days_of(connection, "outbox.message")
        for day in days:
            connection.execute(LOG, {"begin": day.begin, "end": day.end})
        fill_messages(connection, days[0], waiting, settled=False)
        connection.execute(DEAD_LETTERS)
        connection.execute("VACUUM (ANALYZE) outbox.deferral")
        connection.execute("ANALYZE inbox.dead_letter")


def subscribe(url: str) -> None:
    """Add a consumer that reads the outbox; nothing of its topic is added."""
    with administration(url, application_name="benchmark") as connection:
        add_reader(connection, "benchmark", ["b"], for_consumer=True)


def in_new_session(
    url: str, waiting: int, *, relay: bool = True
) -> Callable[[], float]:
    """Measure in a new session each time."""

    def run() -> float:
        with holding_lanes(url, wanted=relay), reading(url) as connection:
            return milliseconds(connection, waiting)

    return run


def in_same_session(url: str, waiting: int) -> Callable[[], float]:
    """Measure twice in one session; return the second time."""

    def run() -> float:
        with holding_lanes(url, wanted=True), reading(url) as connection:
            milliseconds(connection, waiting)
            return milliseconds(connection, waiting)

    return run


def milliseconds(connection: AdministrationConnection, waiting: int) -> float:
    """Return how long one measurement takes."""
    began = time.perf_counter()
    overview, _ = examine_quickly(connection)
    spent = time.perf_counter() - began
    assert overview.missing == ()
    assert overview.outbox is not None
    assert overview.outbox.estimated == waiting
    return spent * 1_000


@contextmanager
def holding_lanes(url: str, *, wanted: bool) -> Iterator[None]:
    """Hold every lane, as a relay does."""
    with psycopg.connect(
        url, autocommit=True, application_name="pillarbox relay benchmark lease"
    ) as connection:
        if wanted:
            connection.execute(LANES, (LOCK_CLASS,))
        yield


@contextmanager
def reading(url: str) -> Iterator[AdministrationConnection]:
    """Open a new session with the monitor's privileges."""
    with administration(url, application_name="pillarbox status") as connection:
        connection.execute("SET ROLE pillarbox_monitor")
        yield connection
