"""Helpers that observe how expired partitions are detached and dropped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

from pillarbox.outbox.administration.upkeep import APPLICATION_NAME, plan_upkeep
from tests.fixtures.sessions import execute
from tests.outbox.administration.test_upkeep import add_old, old_partition

PENDING = (
    "SELECT 1 FROM outbox.partitions('outbox.message') WHERE detach_pending"
    " AND outbox.detach_under_way()"
)
LEFT = "SELECT 1 FROM outbox.partitions(%(table)s) WHERE detach_pending"
EXPIRED = (
    "SELECT partition::text FROM outbox.partitions('outbox.message')"
    " WHERE ends_at < now() - 7 * interval '24 hours'"
)
AT_THE_NOTES = (
    "SELECT pg_advisory_xact_lock(hashtextextended("
    "'outbox.finish_detached outbox.message', 0))"
)
"""Takes the lock that an upkeep holds while it drops partitions."""
NOTE_A_JOB = (
    "INSERT INTO outbox.retiring_partition (partition, parent_table, starts_at,"
    " ends_at, detach_by) SELECT partition, parent_table, starts_at, ends_at, 'pg_cron'"
    " FROM outbox.upkeep_plan('outbox.message') WHERE step = 'detach'"
    " ON CONFLICT (partition) DO NOTHING"
)
"""Records expired partitions as the plan of pg_cron's jobs does."""
NOTED = (
    "SELECT partition FROM outbox.retiring_partition"
    " WHERE parent_table = 'outbox.message'"
)


NOTE = (
    "INSERT INTO outbox.retiring_partition SELECT partition, %(table)s, starts_at,"
    " ends_at, now(), %(by)s FROM outbox.partitions(%(table)s)"
    " WHERE partition = %(partition)s::regclass"
)


def note(
    url: str, partition: str, table: str = "outbox.message", by: str = "pg_cron"
) -> None:
    """Record that this partition is to be detached."""
    execute(url, NOTE, {"partition": partition, "table": table, "by": by})


def detach(url: str, partition: str, table: str = "outbox.message") -> None:
    """Detach it by the statement that jobs use, so that nothing tells them apart."""
    execute(url, f"ALTER TABLE {table} DETACH PARTITION {partition} CONCURRENTLY")


def leave_detached(url: str, days: int = 20, outcome: str | None = "published") -> str:
    """Leave the state of a run that was killed between its detach and its drop."""
    old_partition(url, days)
    add_old(url, days, outcome)
    partition = str(execute(url, EXPIRED)[0][0])
    note(url, partition, by=APPLICATION_NAME)
    detach(url, partition)
    return partition


def interrupt_a_detach(url: str, partition: str, table: str = "outbox.message") -> None:
    """Leave the state of a detach that was canceled while it waited for a reader."""
    detach = f"ALTER TABLE {table} DETACH PARTITION {partition} CONCURRENTLY"
    with reader(url, table), psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET statement_timeout = '50ms'")
        # On a busy machine it may be canceled earlier, and then leaves nothing.
        while not execute(url, LEFT, {"table": table}):
            with pytest.raises(psycopg.errors.QueryCanceled):
                connection.execute(detach.encode())


def leave_interrupted(url: str) -> str:
    """Leave a planned detach that was canceled while it waited for a reader."""
    old_partition(url)
    partition = str(execute(url, EXPIRED)[0][0])
    note(url, partition)
    interrupt_a_detach(url, partition)
    assert steps(url, "finalize") == ["finalize"]
    return partition


@contextmanager
def acting_as(url: str, role: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(
        url, autocommit=True, application_name=APPLICATION_NAME
    ) as connection:
        connection.execute(f"SET SESSION AUTHORIZATION {role}")
        yield connection


@contextmanager
def reader(
    url: str, table: str = "outbox.message"
) -> Iterator[psycopg.Connection[Any]]:
    """Keep a session idle in a transaction that has read the table."""
    with psycopg.connect(url) as connection:
        connection.execute(f"SELECT count(*) FROM {table}".encode())
        yield connection
        connection.rollback()


def steps(
    url: str, *interesting: str, table: str | None = "outbox.message"
) -> list[str]:
    """Return the steps that the upkeep would now take for one table or for all."""
    with psycopg.connect(url, autocommit=True) as connection:
        return [
            s.step
            for s in plan_upkeep(connection)
            if s.step in interesting and table in {None, s.parent_table}
        ]


def about_messages(told: list[str]) -> list[str]:
    """Return an upkeep's lines about outbox.message, without those of its followers."""
    return [line for line in told if line.startswith("outbox.message_p")]
