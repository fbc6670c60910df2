"""A migration that can't get a lock fails, and changes nothing."""

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


def test_a_migration_waits_only_briefly_for_another_one(database_url: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as foreign:
        foreign.execute(
            "SELECT pg_advisory_lock(%s, %s)", (LOCK_CLASS, int(Lock.MIGRATION))
        )
        with pytest.raises(MigrationError, match="another migration runs"):
            migrate_for_a_week(database_url)
    migrate_for_a_week(database_url)


def test_a_migration_waits_only_briefly_for_a_table_and_nothing_changes(
    database_url: str,
) -> None:
    url = database_url
    execute(url, "REVOKE SELECT ON outbox.message FROM pillarbox_relay")
    before = snapshot(url)
    with psycopg.connect(url) as holder:
        holder.execute("LOCK TABLE outbox.promise IN SHARE MODE")
        with pytest.raises(MigrationError, match="timed out waiting for a lock"):
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
    # While it waits for its turn, and then.
    assert limits == ["3600;", "300;"]
    assert printed.count("BEGIN;") == 1
