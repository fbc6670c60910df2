"""Rows that hold a partition are found by an index, with any statistics."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures import positions
from tests.fixtures.days import make_partitions_at
from tests.fixtures.postgres import Template, new_database

ROWS = 5_000
DAYS_AGO = 40
TABLES = (
    "inbox.dead_letter",
    "inbox.job",
    "outbox.dead_letter",
    "outbox.message",
)
FILL_DEAD_LETTERS = """
INSERT INTO {} (created_at, origin, message_id, topic, attempts, schema_version,
                content_type, headers, payload, error_reason)
SELECT %(at)s + n * interval '1 second', 'o', n::text, 't', 1, 1, 'c', '{{}}', '', 'why'
  FROM generate_series(1, %(rows)s) AS n
"""
FILL = {
    "outbox.message": """
INSERT INTO outbox.message (id, created_at, lane, topic, content_type, payload)
SELECT gen_random_uuid(), %(at)s + n * interval '1 second', n %% 48, 't', 'c', ''
  FROM generate_series(1, %(rows)s) AS n
""",
    "outbox.dead_letter": FILL_DEAD_LETTERS.format("outbox.dead_letter"),
    "inbox.dead_letter": FILL_DEAD_LETTERS.format("inbox.dead_letter"),
    # The time in milliseconds, then the rest of a UUIDv7.
    "inbox.job": """
INSERT INTO inbox.job (message_id, message_at, consumer)
SELECT id, inbox.moment_of(id), 'reports'
  FROM generate_series(1, %(rows)s) AS n,
       LATERAL (SELECT (lpad(to_hex(extract(epoch FROM %(at)s)::bigint * 1000 + n),
                             12, '0') || '70008000000000000000')::uuid) AS made (id)
""",
}
SETTLE = {
    "outbox.dead_letter": "UPDATE {} SET status = 'SUCCEEDED'",
    "inbox.dead_letter": "UPDATE {} SET status = 'SUCCEEDED'",
    "inbox.job": "UPDATE {} SET state = 'success', finished_at = now()",
}
# When the partition was analyzed.
STATISTICS = ("none", "before they were settled", "settled")
OLD = "SELECT partition::text FROM outbox.partitions(%s) ORDER BY starts_at LIMIT 1"
READ = """
SELECT seq_scan, seq_tup_read, idx_scan FROM pg_stat_xact_user_tables
 WHERE relid = %s::regclass
"""
CALLS = """
SELECT funcname, calls FROM pg_stat_xact_user_functions
 WHERE funcname IN ('upkeep_plan', 'what_keeps')
"""
QUIET_HOUR = """
SELECT outbox.make_partitions(%(table)s),
       (SELECT count(*) FROM outbox.finish_detached(%(table)s))
"""
CALLS_OF_THE_HOUR = "SELECT funcname, calls FROM pg_stat_xact_user_functions"


@pytest.fixture(scope="module", params=STATISTICS)
def settled(
    request: pytest.FixtureRequest, server: PostgresServer, template: Template
) -> Iterator[str]:
    """A database with an expired day of settled rows in each table."""
    midnight = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    at = midnight - timedelta(days=DAYS_AGO)
    with new_database(server, "pillarbox_upkeep_plans", template) as name:
        url = server.database_url(name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET timezone = 'UTC'")
            connection.execute("SET ROLE pillarbox_owner")
            for table in TABLES:
                connection.execute(make_partitions_at(table), ([at],))
                day = old_day(connection, table)
                run(connection, f"ALTER TABLE {day} SET (autovacuum_enabled = off)")
                connection.execute(FILL[table].encode(), {"at": at, "rows": ROWS})
                if request.param == "before they were settled":
                    run(connection, f"ANALYZE {day}")
                if table == "outbox.message":
                    positions.publish(url)
                else:
                    run(connection, SETTLE[table].format(day))
                if request.param == "settled":
                    run(connection, f"ANALYZE {day}")
        yield url


@pytest.fixture
def looking(settled: str) -> Iterator[psycopg.Connection[Any]]:
    """A session in a transaction, whose reads PostgreSQL counts."""
    with psycopg.connect(settled) as connection:
        connection.execute("SET track_functions = 'all'")
        yield connection
        connection.rollback()


def old_day(connection: psycopg.Connection[Any], table: str) -> str:
    ((partition,),) = connection.execute(OLD, (table,)).fetchall()
    return str(partition)


def run(connection: psycopg.Connection[Any], statement: str) -> None:
    connection.execute(statement.encode())


def test_every_table_with_rows_is_tested(
    looking: psycopg.Connection[Any],
) -> None:
    held = looking.execute(
        "SELECT parent_table FROM outbox.partition_policy"
        " WHERE unsettled IS NOT NULL OR gate IS NOT NULL ORDER BY 1"
    ).fetchall()

    assert held == [(table,) for table in TABLES]


@pytest.mark.parametrize("table", TABLES)
def test_the_plan_reads_no_partition_attached_or_detached(
    table: str, looking: psycopg.Connection[Any]
) -> None:
    day = old_day(looking, table)
    plan = "SELECT step FROM outbox.upkeep_plan(%s) WHERE partition = %s"

    assert looking.execute(plan, (table, day)).fetchall() == [("detach",)]
    ((*read, by_index),) = looking.execute(READ, (day,)).fetchall()
    assert read == [0, 0]
    assert by_index > 0

    note = (
        "INSERT INTO outbox.retiring_partition"
        " SELECT partition, %s, starts_at, ends_at, now(), 'pillarbox maintain'"
        " FROM outbox.partitions(%s) WHERE partition = %s::regclass"
    )
    looking.execute(note, (table, table, day))
    run(looking, f"ALTER TABLE {table} DETACH PARTITION {day}")

    assert looking.execute(plan, (table, day)).fetchall() == [("drop",)]
    ((*read, by_index_too),) = looking.execute(READ, (day,)).fetchall()
    assert read == [0, 0]
    assert by_index_too > by_index


def test_each_partition_is_visited_once(
    looking: psycopg.Connection[Any],
) -> None:
    looking.execute("SELECT outbox.finish_detached('outbox.message')")

    calls = dict(looking.execute(CALLS).fetchall())
    assert calls == {"upkeep_plan": 1, "what_keeps": 1}


@pytest.mark.parametrize("table", ["inbox.receipt", "outbox.message"])
def test_an_upkeep_with_nothing_to_do_does_not_call_pg_partman(
    table: str, database_url: str
) -> None:
    with psycopg.connect(database_url) as connection:
        # The first upkeep after midnight has work to do.
        connection.execute(QUIET_HOUR, {"table": table})
        connection.commit()
        connection.execute("SET track_functions = 'all'")

        connection.execute(QUIET_HOUR, {"table": table})

        calls: dict[str, int] = dict(connection.execute(CALLS_OF_THE_HOUR).fetchall())
    assert "create_partition_time" not in calls
    assert "partitions" in calls


def test_functions_that_forbid_reads_avoid_expensive_plans(
    database_url: str,
) -> None:
    with psycopg.connect(database_url) as connection:
        compiled = connection.execute(
            "SELECT proname FROM pg_proc WHERE 'enable_seqscan=off' = ANY (proconfig)"
            " AND NOT 'jit=off' = ANY (proconfig)"
        ).fetchall()

    assert compiled == []
