"""Once the remedies that the doctor prints have been pasted, it finds nothing."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from outbox.testing.postgres import postgres_server
from tests.fixtures.doctor import Doctor
from tests.fixtures.marks import count_holding, replay
from tests.fixtures.pasting import paste
from tests.fixtures.sessions import execute
from tests.outbox.administration.broken import BROKEN, SEEN
from tests.outbox.administration.test_detach import leave_detached
from tests.outbox.administration.test_upkeep import add_old, old_partition

# Fakes can't be repaired, and a person has to restore objects that were dropped, and to
# decide what becomes of partitions that pillarbox didn't create.
OTHERWISE = {
    "there is a DEFAULT partition",
    "a partition begins in another time zone",
    "a partition has no begin",
    "part of the schema is missing",
    "a limit of the table is gone",
    "no relay runs",
    "a transaction was prepared and forgotten",
    "a transaction stays open",
    "the reader of a replication slot is far behind",
    "pg_partman is older than we can use",
    "pg_partman was not upgraded with its files",
}


def paste_remedies(url: str, doctor: Doctor) -> None:
    """Paste all remedies, twice, because the first ones can reveal further problems."""
    for _ in range(2):
        for found in doctor(url)[1]:
            paste(url, found["remedy"])


@pytest.mark.week
@pytest.mark.parametrize("broken", sorted(BROKEN.keys() - OTHERWISE))
def test_the_printed_remedy_repairs_the_problem(
    broken: str, database_url: str, doctor: Doctor
) -> None:
    execute(database_url, BROKEN[broken][0])
    assert doctor(database_url)[1] != []

    paste_remedies(database_url, doctor)

    assert doctor(database_url)[1] == []
    execute(database_url, "CALL outbox.maintain()")


def test_the_remedy_for_a_lagging_replication_slot_works(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, BROKEN["the reader of a replication slot is far behind"][0])

    paste_remedies(database_url, doctor)


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


@pytest.fixture
def url_with_prepared_transactions(doctor: Doctor) -> Iterator[str]:
    """Start a server on which transactions can be prepared."""
    with postgres_server(
        settings={"max_prepared_transactions": "2"}, durable=False
    ) as server:
        yield server.url


def test_a_prepared_transaction_is_committed(
    url_with_prepared_transactions: str, doctor: Doctor
) -> None:
    url = url_with_prepared_transactions
    paste(url, "pillarbox migrate --without-cron")
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


def test_the_rows_that_hold_a_partition_are_shown(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    add_old(database_url)

    shown = paste(database_url, held_finding(database_url, doctor)["remedy"])

    assert len(shown.splitlines()) == 1


def test_a_detached_partition_with_an_unsettled_row_is_attached(
    database_url: str, doctor: Doctor
) -> None:
    name = leave_detached(database_url)
    replay(database_url, table=name)
    found = held_finding(database_url, doctor)
    assert "queries don't see it" in found["finding"]

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

    shown = paste(database_url, held_finding(database_url, doctor)["remedy"])

    assert shown == f"{broken}\n"


def test_an_overdue_partition_is_reported_with_the_blocking_session(
    database_url: str, doctor: Doctor
) -> None:
    old_partition(database_url)
    (late,) = (f for f in doctor(database_url)[1] if f["check"] == "retention")

    paste(database_url, late["remedy"])

    assert late["remedy"].endswith("-- then: pillarbox maintain")
    paste(database_url, "pillarbox maintain")
    assert doctor(database_url)[1] == []


def test_a_dropped_part_of_the_schema_is_named_with_its_source(
    database_url: str, doctor: Doctor
) -> None:
    execute(database_url, BROKEN["part of the schema is missing"][0])

    remedies = {f["remedy"] for f in doctor(database_url)[1]}

    assert remedies
    source = "which pillarbox migrate --sql prints"
    assert all(source in remedy for remedy in remedies)


def test_a_schema_of_an_older_version_is_migrated(
    database_url: str, doctor: Doctor
) -> None:
    paste(database_url, "pillarbox migrate --without-cron")
    execute(database_url, "UPDATE outbox.alembic_version SET version_num = '0009'")
    (newer,) = doctor(database_url)[1]
    assert newer["remedy"] == "pip install --upgrade pillarbox"
