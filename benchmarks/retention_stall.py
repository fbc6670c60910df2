"""How long writers wait while partitions are dropped and a transaction is open.

A session that is idle in a transaction has read the table. pg_partman's own drop asks
for an exclusive lock on it, and every writer queues behind that request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any

import psycopg

from benchmarks.conditions import Conditions, show
from benchmarks.measure import Answer, Measurement, Variant, at_most, measure, quantity
from benchmarks.stall import (
    COUNT_EXPIRED,
    LAUNCH,
    OurDrop,
    Upkeep,
    longest_insert,
    no_drop,
    partman_drop,
    prepare,
    value,
)
from benchmarks.stalled_writers import WRITERS
from outbox.administration.migrate import migrate, unmigrate
from outbox.errors import OutboxError

EXPIRED_DAYS = 3
ROWS = 1_000
LONGEST_STALL = 50
RUNS_PG_CRON = """
SELECT current_setting('cron.database_name', true) = current_database()
   AND to_regnamespace('outbox') IS NULL
"""
COUNT_PENDING = """
SELECT count(*) FROM outbox.partitions('outbox.message') WHERE detach_pending
"""
POLL = 0.1
BESIDE = {
    "no drop": "what is left of the machine's own: a figure near it has no other cause",
    "pg_partman's drop": "drop_partition_time(), which makes no day ahead",
}


def answers(conditions: Conditions) -> Iterator[Answer]:
    idle = conditions.size(60, quick=10)
    found, comparisons = in_three_ways(
        f"retention: longest insert beside a reader idle for {idle} s",
        lambda upkeep: longest_stall(conditions, upkeep, idle),
        expired=f", {EXPIRED_DAYS} expired",
    )
    yield from comparisons
    yield from by_pg_cron(conditions, idle, found)


def in_three_ways(
    question: str,
    longest_stall: Callable[[Upkeep], Callable[[], float]],
    expired: str = "",
) -> tuple[Measurement, list[Answer]]:
    """Run pillarbox's drop, pg_partman's, none, and pillarbox's again, once each."""
    drop = OurDrop()
    found = measure(
        Variant(label="ours", run=longest_stall(drop)),
        Variant(label="pg_partman's drop", run=longest_stall(partman_drop)),
        Variant(label="no drop", run=longest_stall(no_drop)),
        runs=1,
        on_run=lambda label, figure: show(label, figure, "ms"),
    )
    answer = Answer(
        question=question,
        figure=max(*found.subject.figures, *found.again.figures),
        unit="ms",
        target=at_most(LONGEST_STALL),
        noise=found.noise,
        detail=f"{WRITERS} writers, one day missing ahead{expired}: "
        f"{found.medians('ms')}; {drop}",
    )
    comparisons = [
        Answer(
            question=f"{question}, {label}",
            figure=found.other(label).median,
            unit="ms",
            detail=detail,
        )
        for label, detail in BESIDE.items()
    ]
    return found, [answer, *comparisons]


def by_pg_cron(
    conditions: Conditions, idle: int, found: Measurement
) -> Iterator[Answer]:
    """Measure the same with the jobs of pg_cron, if its database has no outbox."""
    with psycopg.connect(conditions.server.url) as connection:
        if not value(connection, RUNS_PG_CRON):
            return
    with pg_cron_database(conditions) as url:
        prepare(url, days=1, rows=ROWS)
        figure = longest_insert(
            url, cron_drop, seconds=idle, reader=True, launch=LAUNCH
        )
    show("by pg_cron", figure, "ms")
    usual = quantity(found.other("no drop").median, "ms")
    yield Answer(
        question=f"retention: the same by pg_cron, reader idle for {idle} s",
        figure=figure,
        unit="ms",
        target=at_most(LONGEST_STALL),
        detail=f"{WRITERS} writers, one day missing ahead, 1 expired; no drop {usual}",
    )


def longest_stall(
    conditions: Conditions, upkeep: Upkeep, idle: int
) -> Callable[[], float]:
    def run() -> float:
        with conditions.migrated_database() as url:
            prepare(url, days=EXPIRED_DAYS, rows=ROWS)
            return longest_insert(url, upkeep, seconds=idle, reader=True)

    return run


@contextmanager
def pg_cron_database(conditions: Conditions) -> Iterator[str]:
    """Yield the URL of the main database, migrated, with jobs; then undo that."""
    url = conditions.server.url
    migrate(url)
    try:
        yield url
    finally:
        unmigrate(url)


def cron_drop(connection: psycopg.Connection[Any], begun: Event) -> None:
    """Schedule the detach and let pg_cron run it; then run the upkeep job."""
    run_as(connection, "pillarbox_detacher", "SELECT outbox.schedule_detaches()")
    wait_until(lambda: value(connection, COUNT_PENDING) == 1)
    begun.set()
    wait_until(lambda: value(connection, COUNT_EXPIRED) == 0)
    command = value(
        connection, "SELECT command FROM cron.job WHERE jobname = 'pillarbox upkeep'"
    )
    run_as(connection, "pillarbox_maintainer", command)


def run_as(connection: psycopg.Connection[Any], role: str, statement: str) -> None:
    """Run a statement as pg_cron does: in a session of the role, at top level."""
    connection.execute(f"SET SESSION AUTHORIZATION {role}".encode())
    try:
        connection.execute(statement.encode())
    finally:
        connection.execute("RESET SESSION AUTHORIZATION")


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until another session has done something."""
    end = time.monotonic() + 2 * LAUNCH
    while not condition():
        if time.monotonic() > end:
            raise OutboxError("pg_cron did not run the detach in time")
        time.sleep(POLL)
