"""The longest of many inserts while expired partitions are dropped."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import psycopg

from benchmarks.history import days_of, fill_messages, make_days
from benchmarks.stalled_writers import Writers
from pillarbox.outbox.administration.upkeep import APPLICATION_NAME, maintain
from pillarbox.outbox.errors import OutboxError

Upkeep: TypeAlias = Callable[["psycopg.Connection[Any]"], None]
"""Drops the expired partitions."""

NEWEST_EXPIRED = 21
LEAD = 2
"""How many seconds the writers run before the upkeep begins, and after it ends."""

DROP_A_DAY_AHEAD = """
SELECT 'DROP TABLE ' || partition FROM outbox.partitions('outbox.message')
 WHERE starts_at > now() ORDER BY starts_at OFFSET 2 LIMIT 1
"""
COUNT_EXPIRED = """
SELECT count(*) FROM outbox.partitions('outbox.message')
 WHERE ends_at < now() - interval '10 days'
"""
COUNT_MISSING = "SELECT count(*) FROM outbox.missing_partitions('outbox.message')"
PARTMAN_DROP = """
SELECT partman.drop_partition_time(
    'outbox.message', p_retention => '7 days', p_keep_table => false)
"""


def prepare(url: str, *, days: int, rows: int) -> None:
    """Create expired days with this many settled rows in each; open a gap ahead.

    The gap is the third day from now, which the upkeep has to create.
    """
    oldest = NEWEST_EXPIRED + days - 1
    with psycopg.connect(url, autocommit=True) as connection:
        make_days(connection, "outbox.message", newest=NEWEST_EXPIRED, oldest=oldest)
        for day in days_of(connection, "outbox.message")[-days:]:
            fill_messages(connection, day, rows)
        connection.execute(value(connection, DROP_A_DAY_AHEAD))


def longest_insert(url: str, upkeep: Upkeep, *, seconds: int, reader: bool) -> float:
    """Return the longest stall from the start of the upkeep, in milliseconds.

    Args:
        seconds: how long to watch, and how long a reader's transaction stays open.
        reader: whether a session is idle in a transaction that has read the table.
    """
    with TemporaryDirectory() as path, ExitStack() as stack:
        directory = Path(path)
        thread = stack.enter_context(ThreadPoolExecutor(1))
        keeper, other = (
            stack.enter_context(
                psycopg.connect(url, autocommit=True, application_name=name)
            )
            for name in (APPLICATION_NAME, "reader")
        )
        writers = Writers(url, directory, seconds=seconds + 2 * LEAD)
        stack.callback(writers.kill)
        time.sleep(LEAD)
        if reader:
            other.execute("BEGIN")
            other.execute("SELECT count(*) FROM outbox.message")
        began = time.time()
        keeping = thread.submit(run, upkeep, keeper)
        time.sleep(seconds)
        if reader:
            other.execute("ROLLBACK")
        keeping.result()
        if not writers.at_work:
            raise OutboxError(f"the upkeep took longer than {seconds} s of writing")
        writers.finish()
        return writers.longest_stall(began, began + seconds + LEAD)


def run(upkeep: Upkeep, keeper: psycopg.Connection[Any]) -> None:
    """Run the upkeep, and check that it left nothing to do."""
    upkeep(keeper)
    if upkeep is not no_drop:
        left = value(keeper, COUNT_EXPIRED)
        assert left == 0, f"{left} expired partitions are still there"
    if upkeep not in {no_drop, partman_drop}:
        missing = value(keeper, COUNT_MISSING)
        assert missing == 0, f"{missing} partitions are missing"


def our_drop(connection: psycopg.Connection[Any]) -> None:
    """Run `pillarbox maintain` until no expired partition is left."""
    while True:
        maintain(connection, report=lambda _: None)
        if not value(connection, COUNT_EXPIRED):
            return


def partman_drop(connection: psycopg.Connection[Any]) -> None:
    """Let pg_partman drop the partitions; it doesn't create the missing day."""
    connection.execute("SET timezone = 'UTC'")
    connection.execute(PARTMAN_DROP)


def no_drop(connection: psycopg.Connection[Any]) -> None:
    """Drop nothing, to show the longest insert when nothing causes a stall."""


def value(connection: psycopg.Connection[Any], query: str) -> Any:
    """Return the one value of a query."""
    found = connection.execute(query.encode()).fetchone()
    assert found is not None
    return found[0]
