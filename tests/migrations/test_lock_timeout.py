"""A migration that can't get a lock fails, and names the sessions that hold it."""

from datetime import timedelta

import psycopg
import pytest

from outbox.administration.migrate import migrate, migration_sql
from outbox.cli.main import main
from outbox.errors import ConfigError, MigrationError
from outbox.migrations.parts import Part
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from tests.fixtures.sessions import execute
from tests.migrations.catalog import snapshot

pytestmark = pytest.mark.usefixtures("alone")

SHORT = timedelta(milliseconds=300)


def test_another_session_that_holds_the_migration_lock_is_named(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with psycopg.connect(
        database_url, autocommit=True, application_name="just looking"
    ) as foreign:
        pid = foreign.info.backend_pid
        foreign.execute(
            "SELECT pg_advisory_lock(%s, %s)", (LOCK_CLASS, int(Lock.MIGRATION))
        )
        options = ["--without-cron", "--lock-timeout", "0.05s"]
        assert main(["migrate", "--database", database_url, *options]) == 2

    said = capsys.readouterr().err
    assert f"pid {pid} (role postgres" in said
    assert "application 'just looking'" in said
    assert "holds the lock of migrations" in said
    assert "nothing was changed" in said
    assert "--lock-timeout" in said


def test_a_long_transaction_on_a_table_is_named_and_nothing_changes(
    database_url: str,
) -> None:
    url = database_url
    execute(url, "ALTER TABLE outbox.message DROP CONSTRAINT topic_size")
    before = snapshot(url)
    with psycopg.connect(url) as reader:
        reader.execute("SELECT count(*) FROM outbox.message")
        with pytest.raises(MigrationError, match=r"holds a lock on outbox\.message"):
            migrate(url, with_cron=False, lock_timeout=SHORT)
        assert snapshot(url) == before
    migrate(url, with_cron=False, lock_timeout=SHORT)
    assert snapshot(url) != before


def test_a_held_lock_of_creating_partitions_fails_a_migration_that_can_be_repeated(
    database_url: str,
) -> None:
    url = database_url
    with psycopg.connect(url, autocommit=True) as foreign:
        foreign.execute(
            "SELECT pg_advisory_lock("
            "hashtextextended('outbox.make_partitions outbox.message', 0))"
        )
        with pytest.raises(MigrationError, match="timed out waiting for a lock"):
            migrate(url, with_cron=False, lock_timeout=SHORT)
    migrate(url, with_cron=False)


@pytest.mark.parametrize("part", [None, *Part])
def test_the_printed_sql_has_the_same_lock_timeout(part: str | None) -> None:
    printed = migration_sql(part=part, lock_timeout=SHORT)
    limits = [
        line.removeprefix("SET LOCAL lock_timeout = ")
        for line in printed.splitlines()
        if line.startswith("SET LOCAL lock_timeout")
    ]
    # One for each transaction, and two more in the first, around the wait for its turn.
    assert limits == ["300;", "3600;", "300;", "300;"]
    assert printed.count("BEGIN;") == 2


@pytest.mark.parametrize("seconds", [0, -1])
def test_an_invalid_timeout_is_refused(seconds: int) -> None:
    with pytest.raises(ConfigError, match="lock_timeout="):
        migration_sql(lock_timeout=timedelta(seconds=seconds))
