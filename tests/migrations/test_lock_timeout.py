"""A migration that can't get a lock fails, and names the sessions that hold it."""

from datetime import timedelta

import psycopg
import pytest

from outbox.administration.migrate import migration_sql
from outbox.errors import MigrationError
from outbox.migrations.script import Part
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot

pytestmark = pytest.mark.usefixtures("alone", "short")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let migrations give up soon."""
    limit = timedelta(milliseconds=300)
    monkeypatch.setattr("outbox.administration.migrate.LOCK_TIMEOUT", limit)


def test_another_session_that_holds_the_migration_lock_is_named(
    database_url: str,
) -> None:
    with psycopg.connect(
        database_url, autocommit=True, application_name="just looking"
    ) as foreign:
        pid = foreign.info.backend_pid
        foreign.execute(
            "SELECT pg_advisory_lock(%s, %s)", (LOCK_CLASS, int(Lock.MIGRATION))
        )
        with pytest.raises(MigrationError) as raised:
            migrate_for_a_week(database_url)

    said = str(raised.value)
    assert f"pid {pid} (role postgres" in said
    assert "application 'just looking'" in said
    assert "holds the lock of migrations" in said
    assert "nothing was changed" in said
    assert "try again" in said


def test_a_long_transaction_on_a_table_is_named_and_nothing_changes(
    database_url: str,
) -> None:
    url = database_url
    execute(url, "ALTER TABLE outbox.message DROP CONSTRAINT topic_size")
    before = snapshot(url)
    with psycopg.connect(url) as reader:
        reader.execute("SELECT count(*) FROM outbox.message")
        with pytest.raises(MigrationError, match=r"holds a lock on outbox\.message"):
            migrate_for_a_week(url)
        assert snapshot(url) == before
    migrate_for_a_week(url)
    assert snapshot(url) != before


@pytest.mark.parametrize("part", [None, *Part])
def test_the_printed_sql_has_the_same_lock_timeout(part: str | None) -> None:
    printed = migration_sql(part=part)
    limits = [
        line.removeprefix("SET LOCAL lock_timeout = ")
        for line in printed.splitlines()
        if line.startswith("SET LOCAL lock_timeout")
    ]
    # One for each transaction, and two more in the first, around the wait for its turn.
    assert limits == ["300;", "3600;", "300;", "300;"]
    assert printed.count("BEGIN;") == 2
