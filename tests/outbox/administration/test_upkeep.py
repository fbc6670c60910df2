"""The upkeep premakes partitions and drops only settled ones; pg_cron runs it."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from outbox.administration.migrate import unmigrate
from outbox.administration.upkeep import maintain
from outbox.errors import UpkeepError
from outbox.testing.postgres import PostgresServer
from tests.fixtures.days import make_partitions_at
from tests.fixtures.positions import give_up, publish
from tests.fixtures.postgres import Template, migrate, migrate_for_a_week, one_at_a_time
from tests.fixtures.sessions import execute
from tests.migrations.catalog import drop_roles_of_jobs

Connection = psycopg.Connection[Any]
FOLLOWERS = ["outbox.deferral", "outbox.position"]
"""The tables that follow outbox.message."""
FOLLOWERS_OF_DELIVERIES = ["inbox.deferral", "inbox.position"]
TABLES = [
    "inbox.dead_letter",
    "inbox.job",
    "inbox.message",
    *FOLLOWERS_OF_DELIVERIES,
    "inbox.receipt",
    "inbox.suspect",
    "outbox.dead_letter",
    "outbox.message",
    *FOLLOWERS,
]
"""All tables in the order of the policy: each table before its followers."""


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


def test_bounds_are_utc_midnights_whatever_the_servers_time_zone(
    server: PostgresServer, empty_database_url: str, template: Template
) -> None:
    name = empty_database_url.rpartition("/")[2].partition("?")[0]
    zone = f"ALTER DATABASE \"{name}\" SET timezone = 'Pacific/Chatham'"
    execute(server.url, zone)
    with one_at_a_time(server):
        migrate_for_a_week(empty_database_url)
    assert execute(empty_database_url, "SHOW timezone") == [("Pacific/Chatham",)]
    execute(empty_database_url, "CALL outbox.maintain()")

    for table in TABLES:
        odd = execute(
            empty_database_url,
            "SELECT * FROM outbox.partitions(%s)"
            " WHERE starts_at <> date_trunc('day', starts_at, 'UTC')"
            "    OR ends_at - starts_at <> interval '1 day'",
            (table,),
        )
        assert odd == []
    execute(empty_database_url, "SELECT outbox.add('t', '{}'::jsonb)")


def test_upkeep_that_has_nothing_to_do_changes_nothing(upkeep: Upkeep) -> None:
    query = "SELECT * FROM outbox.partitions('outbox.message')"
    before = upkeep.query(query)

    upkeep.run()

    assert upkeep.query(query) == before
    assert upkeep.heard == []


@pytest.mark.week
def test_a_missing_future_partition_is_created(
    database_url: str, upkeep: Upkeep
) -> None:
    for days in (3, 7):
        ((partition,),) = execute(
            database_url,
            "SELECT partition::text FROM outbox.partitions('outbox.message')"
            " WHERE starts_at = date_trunc('day', now(), 'UTC')"
            " + %s * interval '24 hours'",
            (days,),
        )
        execute(database_url, f"DROP TABLE {partition}")

    upkeep.run()

    assert upkeep.query(
        "SELECT ahead, gaps FROM outbox.partition_health"
        " WHERE parent_table = 'outbox.message'"
    ) == [(7, 0)]


@pytest.mark.week
def test_a_partition_whose_name_is_taken_fails_the_run(
    database_url: str, upkeep: Upkeep
) -> None:
    day = "date_trunc('day', now(), 'UTC') + interval '168 hours'"
    ahead = "SELECT partition::text FROM outbox.partitions('outbox.message')"
    ((taken,),) = execute(database_url, f"{ahead} WHERE starts_at = {day}")
    execute(database_url, f"DROP TABLE {taken}; CREATE TABLE {taken} ()")

    with pytest.raises(UpkeepError, match=r"outbox\.message created no partition"):
        upkeep.run()


def test_the_number_of_premade_partitions_follows_the_policy(
    database_url: str, upkeep: Upkeep
) -> None:
    execute(database_url, "UPDATE outbox.partition_policy SET premake = 10")

    upkeep.run()

    assert upkeep.query("SELECT DISTINCT ahead FROM outbox.partition_health") == [(10,)]


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


def test_a_failure_of_one_table_stops_neither_its_days_ahead_nor_other_tables(
    database_url: str, upkeep: Upkeep
) -> None:
    ((ahead,),) = execute(
        database_url,
        "SELECT partition::text FROM outbox.partitions('inbox.job')"
        " WHERE starts_at = date_trunc('day', now(), 'UTC') + interval '72 hours'",
    )
    execute(database_url, f"DROP TABLE {ahead}")
    old_partition(database_url)
    execute(
        database_url,
        "UPDATE outbox.partition_policy SET unsettled = 'no_such_column IS NULL'"
        " WHERE parent_table = 'inbox.job'",
    )
    old_partition(database_url, table="inbox.job")

    with pytest.raises(UpkeepError, match=r"upkeep: retention of inbox\.job"):
        upkeep.run()

    assert expired(upkeep) == 0
    assert upkeep.query(f"SELECT to_regclass('{ahead}') IS NOT NULL") == [(True,)]


def test_old_foreign_receipts_are_trimmed(database_url: str, upkeep: Upkeep) -> None:
    execute(
        database_url,
        "INSERT INTO inbox.foreign_receipt (source, message_id, consumer, received_at)"
        " SELECT 'stripe', n::text, 'billing', now() - 15 * interval '24 hours'"
        " FROM generate_series(1, 2500) n",
    )
    execute(
        database_url,
        "INSERT INTO inbox.foreign_receipt VALUES ('stripe', 'young', 'billing')",
    )

    upkeep.run()

    rows = execute(database_url, "SELECT message_id FROM inbox.foreign_receipt")
    assert rows == [("young",)]


def test_operations_are_deleted_after_90_days(
    database_url: str, upkeep: Upkeep
) -> None:
    execute(
        database_url,
        "INSERT INTO outbox.operation (kind, selection, reason, asked_by, expected,"
        " asked_at)"
        " SELECT 'retry', '{}', days::text, 'ann', 1, now() - days * interval '1 day'"
        "   FROM unnest('{91, 89}'::int[]) AS o (days)",
    )
    plan = "SELECT partition FROM outbox.upkeep_plan() WHERE parent_table = %s"
    assert execute(database_url, plan, ["outbox.operation"]) == [(None,)]

    upkeep.run()

    rows = execute(database_url, "SELECT reason FROM outbox.operation ORDER BY reason")
    assert rows == [("89",)]
    assert execute(database_url, plan, ["outbox.operation"]) == []


def test_pg_cron_runs_the_upkeep_as_the_maintainer(
    scheduled_server: PostgresServer,
) -> None:
    jobs = "SELECT jobname, schedule, command, username FROM cron.job ORDER BY 1"
    migrate(scheduled_server.url)
    first = execute(scheduled_server.url, jobs)
    assert [(name, role) for name, _, _, role in first] == [
        ("pillarbox plan detaches of pillarbox", "pillarbox_detacher"),
        ("pillarbox trim cron log of pillarbox", "pillarbox_maintainer"),
        ("pillarbox upkeep of pillarbox", "pillarbox_maintainer"),
    ]
    assert first[2][1:3] == (*("7 * * * *", "CALL outbox.maintain()"),)

    migrate(scheduled_server.url)
    assert execute(scheduled_server.url, jobs) == first
    with psycopg.connect(scheduled_server.url, autocommit=True) as connection:
        for _, _, command, role in first:
            connection.execute(f"SET SESSION AUTHORIZATION {role}")
            connection.execute(command)

    unmigrate(scheduled_server.url)
    assert execute(scheduled_server.url, jobs) == []
    # They may have jobs that were scheduled from another database.
    drop_roles_of_jobs(scheduled_server.url, "pillarbox")
