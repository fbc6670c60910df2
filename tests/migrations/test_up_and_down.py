"""Migrating twice, removing, and migrating with SQL give the same schema or none."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pillarbox.outbox.administration.migrate import migrate, migration_sql, unmigrate
from pillarbox.outbox.administration.names import ROLES
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import ConfigError, DatabaseUnavailableError
from pillarbox.outbox.testing.lifetime import free_port
from tests.fixtures.postgres import (
    A_WEEK,
    PARTMAN_SCHEMA,
    migrate_for_a_week,
    removal,
)
from tests.fixtures.sessions import execute
from tests.migrations.catalog import is_empty, snapshot

pytestmark = pytest.mark.usefixtures("alone")


def run_in_psql(url: str, script: str, directory: Path) -> None:
    file = directory / "migration.sql"
    file.write_text(script)
    done = subprocess.run(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", file, url],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.week
def test_a_removal_leaves_what_is_others_and_the_printed_sql_restores_the_schema(
    database_url: str, tmp_path: Path
) -> None:
    first = snapshot(database_url)
    assert not is_empty(first)
    migrate_for_a_week(database_url)
    assert snapshot(database_url) == first
    execute(
        database_url,
        "CREATE TABLE shop_order AS SELECT 7 AS id;"
        " CREATE TABLE alembic_version AS SELECT 'theirs' AS version",
    )

    unmigrate(database_url)
    assert is_empty(snapshot(database_url))
    # The roles are used in the database of which this one is a copy.
    roles = "SELECT count(*) FROM pg_roles WHERE rolname LIKE 'pillarbox%'"
    assert execute(database_url, roles) == [(len(ROLES),)]

    run_in_psql(database_url, migration_sql(with_cron=False), tmp_path)
    assert snapshot(database_url) == first
    # The command recognizes it.
    migrate_for_a_week(database_url)
    assert snapshot(database_url) == first

    run_in_psql(database_url, migration_sql(remove=True), tmp_path)
    assert is_empty(snapshot(database_url))
    theirs = "SELECT id, version FROM shop_order, alembic_version"
    assert execute(database_url, theirs) == [(7, "theirs")]


def test_threads_and_processes_that_migrate_at_once_take_turns(
    empty_database_url: str,
) -> None:
    command = (
        "import sys; from pillarbox.outbox.administration.migrate import migrate;"
        f" migrate(sys.argv[1], with_cron=False, days_ahead={A_WEEK},"
        f" partman_schema={PARTMAN_SCHEMA!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", command, empty_database_url])
    with ThreadPoolExecutor() as pool:
        runs = [pool.submit(migrate_for_a_week, empty_database_url) for _ in range(2)]
        for run in runs:
            run.result(timeout=120)

    assert process.wait(120) == 0
    assert not is_empty(snapshot(empty_database_url))


@pytest.mark.parametrize("name", ["Upper", "semi;colon", "", "x" * 41, '"', "1st"])
def test_names_that_would_need_quotes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"role_prefix=.*: use at most 40 lower-case"):
        migration_sql(role_prefix=name)
    with pytest.raises(ConfigError, match=r"partman_schema=.*: use at most 40"):
        migration_sql(partman_schema=name)


def test_an_unreachable_database_is_named_without_its_password() -> None:
    url = f"postgresql://someone:secret@127.0.0.1:{free_port()}/nowhere"

    with pytest.raises(DatabaseUnavailableError) as refusal:
        migrate(url)

    assert "can't reach the database" in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_every_object_belongs_to_the_owner(database_url: str) -> None:
    owners = execute(
        database_url,
        """
        SELECT DISTINCT owner::regrole::text FROM (
            SELECT nspowner AS owner FROM pg_namespace
             WHERE nspname IN ('outbox', 'inbox')
            UNION ALL
            SELECT relowner FROM pg_class
             WHERE relnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
               AND relname NOT LIKE 'alembic%'
            UNION ALL
            SELECT proowner FROM pg_proc
             WHERE pronamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
            UNION ALL
            SELECT typowner FROM pg_type
             WHERE typnamespace IN ('outbox'::regnamespace, 'inbox'::regnamespace)
               AND typname NOT LIKE '%alembic%'
        ) AS owned
        """,
    )
    assert owners == [("pillarbox_owner",)]


def test_every_table_view_and_sequence_of_the_outbox_has_a_comment(
    database_url: str,
) -> None:
    silent = execute(
        database_url,
        "SELECT relname FROM pg_class WHERE relnamespace = 'outbox'::regnamespace"
        " AND relkind IN ('p', 'v', 'S') AND obj_description(oid) IS NULL",
    )
    assert silent == []
    # `make reference` writes the page of SQL from those of columns.
    columns = execute(
        database_url,
        """
        SELECT p.relation, a.attname, col_description(a.attrelid, a.attnum)
          FROM (SELECT DISTINCT q.relation FROM outbox.promise AS q
                 WHERE q.fact LIKE 'right of % to SELECT%') AS p
          JOIN pg_class AS c ON c.oid = to_regclass(p.relation) AND c.relkind = 'v'
          JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
        """,
    )
    assert ("outbox.message_status", "published_at") in {it[:2] for it in columns}
    assert [it for it in columns if not it[2]] == []


def test_the_command_migrates_prints_and_asks_before_it_removes(
    empty_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["migrate", "--database", empty_database_url]

    assert main(["migrate", "--sql", "all"]) == 0
    assert "CREATE TABLE outbox.message" in capsys.readouterr().out
    assert main([*here, "--without-cron"]) == 0
    assert main(["maintain", "--database", empty_database_url]) == 0
    name = removal(empty_database_url)[2]
    assert main([*here, "--remove", "another"]) == 2
    assert f"write --remove {name} if you mean it" in capsys.readouterr().err
    assert not is_empty(snapshot(empty_database_url))
    assert main([*here, "--remove", name]) == 0
    assert is_empty(snapshot(empty_database_url))
