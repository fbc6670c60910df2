"""A migration that can't get a lock fails, and changes nothing."""

import re
from datetime import timedelta

import psycopg
import pytest

from pillarbox.outbox.administration.migrate import migration_sql
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.migrations.script import Part
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot

pytestmark = pytest.mark.usefixtures("alone", "short")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let migrations give up soon."""
    limit = timedelta(milliseconds=300)
    monkeypatch.setattr("pillarbox.outbox.administration.migrate.LOCK_TIMEOUT", limit)


@pytest.mark.parametrize(
    "lock",
    [
        f"SELECT pg_advisory_lock({LOCK_CLASS}, {int(Lock.MIGRATION)})",
        "SELECT count(*) FROM outbox.message",
    ],
    ids=["of migrations", "of a table"],
)
def test_a_lock_that_another_session_holds_ends_a_migration_and_nothing_changes(
    lock: str, database_url: str
) -> None:
    url = database_url
    execute(url, "ALTER TABLE outbox.message DROP CONSTRAINT topic_size")
    before = snapshot(url)
    with psycopg.connect(url) as holder:
        holder.execute(lock.encode())
        with pytest.raises(
            MigrationError, match=r"waiting for a lock; nothing was changed.*try again"
        ) as refused:
            migrate_for_a_week(url)
        found = re.search(r"by (SELECT .*);", str(refused.value))
        assert found is not None
        holders = [pid for pid, *_ in execute(url, found[1])]
        assert holder.info.backend_pid in holders
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
