"""Helpers that observe how expired partitions are detached and dropped."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from outbox.administration.upkeep import APPLICATION_NAME, plan_upkeep

PENDING = (
    "SELECT 1 FROM outbox.partitions('outbox.message') WHERE detach_pending"
    " AND outbox.detach_under_way()"
)
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


@contextmanager
def acting_as(url: str, role: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(
        url, autocommit=True, application_name=APPLICATION_NAME
    ) as connection:
        connection.execute(f"SET SESSION AUTHORIZATION {role}")
        yield connection


@contextmanager
def reader(url: str) -> Iterator[psycopg.Connection[Any]]:
    """Keep a session idle in a transaction that has read the table."""
    with psycopg.connect(url) as connection:
        connection.execute("SELECT count(*) FROM outbox.message")
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
