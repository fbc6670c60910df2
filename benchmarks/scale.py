"""Whether 90 days with 10 million rows cost more than 8 days with 100 thousand.

Both databases have the same live part: yesterday, today, six days ahead, and a batch
that waits to be published. All other days of the large database come before those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import psycopg
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from benchmarks import guard
from benchmarks.conditions import Conditions, show
from benchmarks.history import days_of, fill_messages, fill_receipts, make_days
from benchmarks.live import LiveBatch
from benchmarks.measure import Answer, Target, Variant, at_most, measure
from pillarbox.outbox.postgres.connection import sqlalchemy_url

Run: TypeAlias = Callable[[], float]

TABLES = ("outbox.message", "inbox.receipt")
AHEAD = 6
LIVE_DAYS = 2
DAYS_A_CHECKPOINT = 10
POLICY = """
UPDATE outbox.partition_policy SET premake = %s, retention = '400 days'
 WHERE follows IS NULL
"""
OTHER_DAYS = """
SELECT format('DROP TABLE %%s', partition) FROM outbox.partitions(%(parent)s)
 WHERE ends_at <= now() OR starts_at > now() + %(ahead)s * interval '1 day'
"""
COUNT = "SELECT count(*) FROM outbox.partitions(%s)"
FOLLOWERS = "SELECT parent_table FROM outbox.partition_policy WHERE follows = %s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How many partitions a table has, and how many settled rows or receipts."""

    partitions: int
    rows: int

    @property
    def label(self) -> str:
        """Its name in the table of answers."""
        return f"{self.partitions} partitions"

    @property
    def days_before(self) -> int:
        """How many days lie before today."""
        return self.partitions - AHEAD - 1


def answers(conditions: Conditions) -> Iterator[Answer]:
    few = Size(partitions=8, rows=conditions.size(100_000, quick=10_000))
    many = Size(partitions=90, rows=conditions.size(10_000_000, quick=100_000))
    batch = conditions.size(20_000, quick=2_000)
    with (
        database(conditions, few, few) as small,
        database(conditions, many, few) as large,
        closing(LiveBatch(small, batch)) as in_small,
        closing(LiveBatch(large, batch)) as in_large,
    ):
        close = at_most(1.1)
        steps: tuple[tuple[str, Target | None, Run, Run], ...] = (
            ("claim", close, in_large.claim, in_small.claim),
            ("take over", None, in_large.take_over, in_small.take_over),
            ("settle", close, in_large.settle, in_small.settle),
            ("guard", close, guarded(conditions, large), guarded(conditions, small)),
            ("upkeep", close, in_large.upkeep, in_small.upkeep),
        )
        for step, target, run_in_large, run_in_small in steps:
            found = measure(
                Variant(label=many.label, run=run_in_large),
                Variant(label=few.label, run=run_in_small),
                runs=conditions.runs(25),
                on_run=lambda label, figure: show(label, figure, "ms"),
            )
            yield Answer(
                question=f"scale: {step}, {many.label} against {few.label}",
                figure=found.ratio(few.label),
                target=target,
                noise=found.noise,
                detail=f"{many.rows:,} and {few.rows:,} rows: {found.medians('ms')}",
            )


@contextmanager
def database(conditions: Conditions, size: Size, live: Size) -> Iterator[str]:
    """Yield a database of one size, with the live part of the smallest."""
    with conditions.migrated_database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(guard.TABLE)
            connection.execute(POLICY, (AHEAD,))
            for parent in TABLES:
                set_partitions(connection, parent, size)
        with ThreadPoolExecutor(len(TABLES)) as both:
            for filled in [both.submit(fill, url, t, size, live) for t in TABLES]:
                filled.result()
        yield url


def set_partitions(connection: psycopg.Connection, parent: str, size: Size) -> None:
    """Keep today and the days ahead, and create the days before today."""
    connection.execute("SET timezone = 'UTC'")
    followers = [table for (table,) in connection.execute(FOLLOWERS, (parent,))]
    for table in (parent, *followers):
        others = connection.execute(OTHER_DAYS, {"parent": table, "ahead": AHEAD})
        for (drop,) in others.fetchall():
            connection.execute(drop)
    make_days(connection, parent, newest=1, oldest=size.days_before)
    assert connection.execute(COUNT, (parent,)).fetchone() == (size.partitions,)


def fill(url: str, parent: str, size: Size, live: Size) -> None:
    """Fill today and yesterday alike for every size; the other days share the rest."""
    add = fill_messages if parent == "outbox.message" else fill_receipts
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET timezone = 'UTC'")
        # Oldest first: the last settlement of a lane is one of today.
        for number, day in reversed([*enumerate(days_of(connection, parent))]):
            rows = live.rows // LIVE_DAYS
            if number >= LIVE_DAYS:
                rows = (size.rows - live.rows) // (size.days_before + 1 - LIVE_DAYS)
            add(connection, day, rows)
            if number % DAYS_A_CHECKPOINT == DAYS_A_CHECKPOINT - 1:
                # Otherwise the write-ahead log would take as much space as the rows.
                connection.execute("CHECKPOINT")


def guarded(conditions: Conditions, url: str) -> Run:
    """Handle new messages with the guard, each in its own transaction."""
    sessions = sessionmaker(create_engine(sqlalchemy_url(url)))
    transactions = conditions.size(250, quick=100)
    return guard.milliseconds(sessions, guard.guarded, transactions)
