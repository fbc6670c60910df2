"""A migration that waits for a lock lets others go on, and ends after some time."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Final

import psycopg
import pytest

from pillarbox.outbox.administration.migrate import migration_sql
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.migrations.script import Part
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.migrations.catalog import snapshot

pytestmark = pytest.mark.usefixtures("alone")


_ADD: Final = "SELECT outbox.add('orders', '{}'::jsonb)"


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let migrations give up soon."""
    limit = timedelta(milliseconds=300)
    monkeypatch.setattr("pillarbox.outbox.administration.migrate.PATIENCE", limit)


@pytest.mark.usefixtures("short")
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
            MigrationError, match=r"waiting for a lock: another.*try again"
        ) as refused:
            migrate_for_a_week(url)
        found = re.search(r"with (SELECT .*), and try again", str(refused.value))
        assert found is not None
        holders = [pid for pid, *_ in execute(url, found[1])]
        assert holder.info.backend_pid in holders
        assert snapshot(url) == before
    migrate_for_a_week(url)
    assert snapshot(url) != before


def test_nobody_queues_behind_a_migration_that_waits_for_a_lock(
    database_url: str,
) -> None:
    url = database_url
    execute(url, "ALTER TABLE outbox.message DROP CONSTRAINT topic_size")
    waiting = (
        "SELECT true FROM pg_locks WHERE NOT granted AND mode = 'AccessExclusiveLock'"
        " AND relation = 'outbox.message'::regclass"
    )
    with psycopg.connect(url) as holder, ThreadPoolExecutor() as threads:
        holder.execute("SELECT count(*) FROM outbox.message")
        migration = threads.submit(migrate_for_a_week, url)
        for _ in range(3):
            wait_for("the migration waits", lambda: execute(url, waiting))
            # Far more than a migration waits for a lock before it tries again.
            execute(f"{url}?options=-clock_timeout%3D3s", _ADD)
        assert migration.running()
        holder.commit()
        migration.result()
    restored = "SELECT true FROM pg_constraint WHERE conname = 'topic_size'"
    assert execute(url, f"{restored} AND conrelid = 'outbox.message'::regclass")


@pytest.mark.parametrize("part", [None, *Part])
def test_the_printed_sql_limits_its_waits_for_locks(part: str | None) -> None:
    printed = migration_sql(part=part)
    limits = [
        line.removeprefix("SET LOCAL lock_timeout = ")
        for line in printed.splitlines()
        if line.startswith("SET LOCAL lock_timeout")
    ]
    # In each transaction, one for its turn among migrations, and one for all others.
    assert limits == ["120000;", "10000;"] * 2
    assert printed.count("BEGIN;") == 2
