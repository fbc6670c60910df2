"""The upkeep premakes partitions and drops only settled ones; pg_cron runs it."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from pillarbox.outbox.administration.upkeep import maintain
from pillarbox.outbox.errors import UpkeepError
from tests.fixtures.days import make_partitions_at
from tests.fixtures.positions import give_up, publish
from tests.fixtures.sessions import execute

Connection = psycopg.Connection[Any]
FOLLOWERS = ["outbox.deferral", "outbox.position"]
"""The tables that follow outbox.message."""
TABLES = [
    "inbox.dead_letter",
    "inbox.job",
    "inbox.receipt",
    "inbox.suspect",
    "outbox.dead_letter",
    "outbox.message",
    *FOLLOWERS,
]
"""All tables in the order of the policy: each table before its followers."""
BREAK_A_CONDITION = (
    "UPDATE outbox.partition_policy SET unsettled = 'no_such_column IS NULL'"
    " WHERE parent_table = 'inbox.job'"
)
"""Lets the retention of one table fail."""


class Upkeep:
    """A detacher's session that records the upkeep's notices, but not its drops."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.heard: list[str] = []
        connection.add_notice_handler(self.hear)

    def hear(self, notice: psycopg.errors.Diagnostic) -> None:
        said = notice.message_primary or ""
        if not said.endswith(": dropped") and said not in self.heard:
            self.heard.append(said)

    def run(self) -> None:
        maintain(self.connection, report=lambda _: None)

    def query(self, query: str) -> list[Any]:
        return self.connection.execute(query).fetchall()


@pytest.fixture
def upkeep(database_url: str) -> Iterator[Upkeep]:
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("SET SESSION AUTHORIZATION pillarbox_detacher")
        yield Upkeep(connection)


def old_partition(url: str, days: int = 20, table: str = "outbox.message") -> None:
    """Create a day's partition, long past retention, and those of its followers."""
    execute(
        f"{url}?options=-crole%3Dpillarbox_owner",
        make_partitions_at(
            table, "ARRAY[date_trunc('day', now(), 'UTC') - %s * interval '24 hours']"
        ).decode(),
        (days,),
    )


def add_old(
    url: str, days: int = 20, outcome: str | None = None, topic: str = "t"
) -> None:
    """Add a message of that day, and settle it if an outcome is given."""
    ((id,),) = execute(
        url,
        "INSERT INTO outbox.message (id, created_at, lane, topic, content_type,"
        " payload) VALUES (outbox.uuid7(),"
        f" date_trunc('day', now(), 'UTC') - interval '{days * 24 - 1} hours',"
        " 0, %s, 'c', '') RETURNING id",
        (topic,),
    )
    if outcome is not None:
        settle = {"published": publish, "dead_lettered": give_up}[outcome]
        settle(url, f"id = '{id}'")


def drop_ahead(url: str, days: int = 3, table: str = "outbox.message") -> str:
    """Drop a day's partition ahead, and return its name."""
    ((partition,),) = execute(
        url,
        "SELECT partition::text FROM outbox.partitions(%s) WHERE starts_at ="
        " date_trunc('day', now(), 'UTC') + %s * interval '24 hours'",
        (table, days),
    )
    execute(url, f"DROP TABLE {partition}")
    return str(partition)


def exists(url: str, table: str) -> bool:
    return execute(url, "SELECT to_regclass(%s) IS NOT NULL", [table]) == [(True,)]


def expired(upkeep: Upkeep) -> int:
    ((count,),) = upkeep.query(
        "SELECT count(*) FROM outbox.partitions('outbox.message')"
        " WHERE ends_at < now() - 7 * interval '24 hours'"
    )
    return int(count)


@pytest.mark.week
def test_a_new_schema_has_a_week_of_partitions_ahead_no_default_and_no_gap(
    upkeep: Upkeep,
) -> None:
    health = upkeep.query(
        "SELECT parent_table, ahead >= 7, has_today, gaps, defaults, overdue,"
        " detach_pending, owners FROM outbox.partition_health ORDER BY 1"
    )
    assert health == [(table, True, True, 0, 0, 0, 0, 1) for table in sorted(TABLES)]


def test_missing_future_partitions_are_created_and_no_others(
    database_url: str, upkeep: Upkeep
) -> None:
    query = "SELECT * FROM outbox.partitions('outbox.message')"
    before = upkeep.query(query)
    upkeep.run()
    assert upkeep.query(query) == before
    assert upkeep.heard == []

    execute(database_url, "UPDATE outbox.partition_policy SET premake = 10")
    for days in (1, 3):
        drop_ahead(database_url, days)

    upkeep.run()

    assert upkeep.query("SELECT DISTINCT ahead, gaps FROM outbox.partition_health") == [
        (10, 0)
    ]


def test_a_partition_with_an_unsettled_row_is_kept_and_reported_until_settled(
    database_url: str, upkeep: Upkeep
) -> None:
    for days in (20, 25):
        old_partition(database_url, days)
    add_old(database_url, 25)
    add_old(database_url, 20, "published")

    upkeep.run()

    # The older day is held; the newer one, which is settled, was dropped.
    assert expired(upkeep) == 1
    assert len(upkeep.heard) == 1
    held = "is held: unsettled rows: 1 (unclaimed), for example"
    assert held in upkeep.heard[0]
    give_up(database_url)
    upkeep.run()
    assert expired(upkeep) == 0
    assert len(upkeep.heard) == 1


def test_a_failure_of_one_table_stops_no_other_step_and_is_no_success(
    database_url: str, upkeep: Upkeep
) -> None:
    ahead = drop_ahead(database_url, table="inbox.job")
    old_partition(database_url)
    execute(database_url, BREAK_A_CONDITION)
    old_partition(database_url, table="inbox.job")

    with pytest.raises(UpkeepError, match=r"upkeep: retention of inbox\.job"):
        upkeep.run()

    assert expired(upkeep) == 0
    assert exists(database_url, ahead)
    assert upkeep.query("SELECT succeeded_at FROM outbox.upkeep") == [(None,)]


def test_old_foreign_receipts_and_operations_are_deleted(
    database_url: str, upkeep: Upkeep
) -> None:
    execute(
        database_url,
        "INSERT INTO inbox.foreign_receipt (source, message_id, consumer, received_at)"
        " SELECT 'stripe', n::text, 'billing', now() - 15 * interval '24 hours'"
        # More than one batch.
        " FROM generate_series(1, 2500) n",
    )
    execute(
        database_url,
        "INSERT INTO inbox.foreign_receipt VALUES ('stripe', 'young', 'billing')",
    )
    execute(
        database_url,
        "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected,"
        " asked_at)"
        " SELECT 'retry', '{}', days::text, 'ann', 1, now() - days * interval '1 day'"
        "   FROM unnest('{91, 89}'::int[]) AS o (days)",
    )
    pause = "SELECT outbox.pause('billing', NULL, 'old', 'ann')"
    execute(database_url, pause)
    execute(
        database_url,
        "UPDATE outbox.operation SET asked_at = now() - interval '100 days'"
        " WHERE kind = 'pause'",
    )
    plan = "SELECT parent_table FROM outbox.upkeep_plan() WHERE step = 'trim'"
    trimmed = [("inbox.foreign_receipt",), ("outbox.operation",)]
    assert execute(database_url, plan) == trimmed

    upkeep.run()

    receipts = execute(database_url, "SELECT message_id FROM inbox.foreign_receipt")
    operations = execute(
        database_url, "SELECT reason FROM outbox.operation ORDER BY asked_at"
    )
    assert (receipts, operations) == ([("young",)], [("old",), ("89",)])
    assert execute(database_url, plan) == []
