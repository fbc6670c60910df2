"""Once the remedies that the doctor prints have been pasted, it finds nothing."""

from typing import Any

import psycopg
import pytest

from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.positions import count_holding, replay
from tests.fixtures.sessions import execute
from tests.outbox.administration.broken import SEEN
from tests.outbox.administration.test_detach import leave_detached
from tests.outbox.administration.test_upkeep import old_partition


def test_a_transaction_that_stays_open_is_terminated(
    database_url: str, doctor: Doctor
) -> None:
    execute(
        database_url,
        SEEN.format(
            "pg_stat_activity",
            "SELECT datname, pid, usename, state, backend_type, application_name,"
            " usesysid, client_addr, backend_start, backend_xid, backend_xmin,"
            " now() - interval '2 hours' AS xact_start"
            " FROM pg_stat_activity_itself WHERE application_name = 'forgotten'",
        ),
    )
    forgotten = psycopg.connect(database_url, application_name="forgotten")
    try:
        (found,) = doctor(database_url)[1]
        assert paste(database_url, found["remedy"]) == "t\n"
        with pytest.raises(psycopg.errors.AdminShutdown):
            forgotten.execute("SELECT 1")
    finally:
        forgotten.close()

    assert doctor(database_url)[1] == []


def test_a_prepared_transaction_is_committed(
    migrated_server: PostgresServer, doctor: Doctor
) -> None:
    url = migrated_server.url
    execute(
        url,
        SEEN.format(
            "pg_prepared_xacts",
            "SELECT gid, prepared - interval '2 hours' AS prepared, database, owner,"
            " transaction"
            " FROM pg_prepared_xacts_itself",
        ),
    )
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT outbox.add('t', '{}'::jsonb)")
        connection.execute("PREPARE TRANSACTION 'it''s forgotten'")
    (found,) = (f for f in doctor(url)[1] if f["check"] == "pins")

    paste(url, found["remedy"])

    assert not any(f["check"] == "pins" for f in doctor(url)[1])
    assert execute(url, "SELECT count(*) FROM outbox.message") == [(1,)]


def held_finding(url: str, doctor: Doctor) -> Any:
    (found,) = (f for f in doctor(url)[1] if "and held" in f["finding"])
    return found


def test_a_detached_partition_with_an_unsettled_row_is_attached(
    database_url: str, doctor: Doctor
) -> None:
    name = leave_detached(database_url)
    replay(database_url, table=name)
    found = held_finding(database_url, doctor)
    assert "queries don't see it" in found["finding"]
    assert f"ALTER TABLE outbox.message ATTACH PARTITION {name}" in found["remedy"]

    paste(database_url, found["remedy"])

    assert "queries don't see it" not in held_finding(database_url, doctor)["finding"]
    assert count_holding(database_url) == 1


@pytest.mark.parametrize(
    ("table", "column", "broken"),
    [
        ("outbox.message", "gate", "outbox.nothing"),
        ("inbox.job", "unsettled", "nothing IS NULL"),
    ],
)
def test_a_condition_that_cannot_be_run_is_shown(
    table: str, column: str, broken: str, database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url, table=table)
    execute(
        database_url,
        f"UPDATE outbox.partition_policy SET {column} = %s WHERE parent_table = %s",
        (broken, table),
    )

    found = held_finding(database_url, doctor)
    assert "its unsettled rows can't be found" in found["finding"]

    assert paste(database_url, found["remedy"]) == f"{broken}\n"


def test_an_overdue_partition_is_reported_with_the_blocking_session(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    assert [f for f in doctor(database_url)[1] if f["check"] == "retention"] == []
    # Only its detach is missing: the routines alone don't do that.
    execute(database_url, "CALL outbox.maintain()")
    execute(
        database_url, "UPDATE outbox.upkeep SET awaited_at = now() - interval '4 hours'"
    )
    (late,) = (f for f in doctor(database_url)[1] if f["check"] == "retention")
    assert "next step: detach" in late["finding"]

    paste(database_url, late["remedy"])

    assert late["remedy"].endswith("-- then: pillarbox maintain")
    paste(database_url, "pillarbox maintain")
    assert doctor(database_url)[1] == []


def test_a_schema_of_a_newer_version_needs_a_newer_package(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, "UPDATE outbox.alembic_version SET version_num = '0009'")
    (newer,) = doctor(database_url)[1]
    assert newer["remedy"] == "pip install --upgrade pillarbox"
