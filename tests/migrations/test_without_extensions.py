"""Everything works on a server without pg_partman and pg_cron, which can come later."""

import subprocess
from collections.abc import Iterator
from typing import Final

import psycopg
import pytest

from pillarbox.outbox.administration.migrate import migrate, migration_sql, unmigrate
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import MigrationError
from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.bare import servers_without
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import (
    FEW_DAYS,
    WITHOUT_PARTMAN,
    migrate_for_a_week,
    removal,
)
from tests.fixtures.roles import new_role
from tests.fixtures.sessions import execute
from tests.fixtures.upkeep import run_upkeep
from tests.migrations.catalog import is_empty, snapshot
from tests.outbox.administration.retiring import EXPIRED
from tests.outbox.administration.test_days import ADD, FORGET
from tests.outbox.administration.test_upkeep import old_partition

pytestmark = pytest.mark.timeout(300)

MIGRATE: Final = ("migrate", "--without-partman", "--without-cron", "--database")
MADE_WITH_PARTMAN: Final = (
    "SELECT to_regprocedure('outbox.make_with_partman(text, timestamptz[])') NOTNULL"
)
FORGOTTEN: Final = (
    f"{FORGET}; UPDATE outbox.upkeep SET awaited_at = now(), succeeded_at = NULL"
)


@pytest.fixture(scope="module")
def bare_server(server: PostgresServer) -> Iterator[PostgresServer]:
    assert server.url  # the one of all tests starts before, with its extensions
    with (
        servers_without("pg_partman", "pg_cron"),
        postgres_server(durable=False) as bare,
    ):
        yield bare


@pytest.fixture
def bare_url(bare_server: PostgresServer) -> Iterator[str]:
    """An empty database of a server that has neither extension."""
    bare_server.create_database("bare")
    yield bare_server.database_url("bare")
    bare_server.drop_database("bare")


def test_both_are_looked_for_before_anything_changes(bare_url: str) -> None:
    before = snapshot(bare_url)

    with pytest.raises(MigrationError) as refused:
        migrate(bare_url)

    text = str(refused.value)
    assert ", pg_partman is missing, pg_cron is missing; nothing was" in text
    assert "-partman)" in text
    assert "-cron)" in text
    assert "shared_preload_libraries = 'pg_cron' and cron.database_name = 'bare'" in (
        text
    )
    assert "add --without-partman --without-cron, and run pillarbox maintain" in text
    assert snapshot(bare_url) == before
    assert execute(bare_url, "SELECT FROM pg_roles WHERE rolname ~ '^pillarbox'") == []
    # Only what is missing need be left out.
    with pytest.raises(MigrationError, match=r"add --without-partman$") as refused:
        migrate(bare_url, with_cron=False)
    assert "apt install postgresql-" in str(refused.value)
    assert "pg_cron" not in str(refused.value)


def test_all_commands_and_the_printed_parts_work_there(
    bare_url: str, doctor: Doctor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MIGRATE, bare_url]) == 0
    made = snapshot(bare_url)
    old_partition(bare_url)
    assert main(["maintain", "--dry-run", "--database", bare_url]) == 0
    assert "DETACH PARTITION" in capsys.readouterr().out

    assert main(["maintain", "--database", bare_url]) == 0

    assert execute(bare_url, EXPIRED) == []
    assert main(["status", "--database", bare_url]) == 0
    execute(bare_url, FORGOTTEN)
    assert main(["maintain", "--database", bare_url]) == 0
    execute(bare_url, ADD)
    assert doctor(bare_url) == (0, [])
    weekly = ["retention", "set", "outbox.message", "9d", "--interval", "weekly"]
    assert main([*weekly, "--database", bare_url]) == 0
    execute(bare_url, "ALTER TABLE outbox.message DROP CONSTRAINT headers_size")
    (found,) = doctor(bare_url)[1]
    # It leaves out what the migration did.
    paste(bare_url, found["remedy"])
    assert doctor(bare_url) == (0, [])
    assert main(removal(bare_url)) == 0
    assert is_empty(snapshot(bare_url))

    for part in ("administrator", "owner"):
        script = migration_sql(part=part, with_cron=False, partman_schema=None)
        done = subprocess.run(
            ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", bare_url],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, "ERROR" in done.stderr) == (0, False)

    assert snapshot(bare_url) == made
    unmigrate(bare_url, partman_schema=None)


@pytest.mark.skipif(WITHOUT_PARTMAN, reason="pg_partman is what comes later")
@pytest.mark.usefixtures("alone")
class TestLater:
    """A later migration, on a server that has pg_partman."""

    @pytest.mark.week
    def test_it_adopts_what_is_there_and_makes_the_days_from_then_on(
        self, empty_database_url: str, database_url: str, doctor: Doctor
    ) -> None:
        execute(
            empty_database_url,
            "CREATE SCHEMA partman; CREATE EXTENSION pg_partman SCHEMA partman",
        )
        migrate_for_a_week(empty_database_url, partman_schema=None)
        assert execute(empty_database_url, MADE_WITH_PARTMAN) == [(False,)]
        with psycopg.connect(empty_database_url) as connection:
            settings = "SELECT count(*) FROM partman.part_config"
            assert connection.execute(settings).fetchone() == (0,)

        migrate_for_a_week(empty_database_url)

        assert snapshot(empty_database_url) == snapshot(database_url)
        assert execute(empty_database_url, MADE_WITH_PARTMAN) == [(True,)]
        execute(empty_database_url, FORGOTTEN)

        run_upkeep(empty_database_url)

        assert doctor(empty_database_url) == (0, [])
        execute(
            empty_database_url,
            f"{FORGOTTEN}; REVOKE ALL ON ALL FUNCTIONS IN SCHEMA partman"
            " FROM pillarbox_owner, public",
        )
        assert main(["maintain", "--database", empty_database_url]) == 2

    def test_and_can_be_left_again(self, database_url: str, doctor: Doctor) -> None:
        migrate_for_a_week(database_url, partman_schema=None)
        execute(database_url, f"{FORGOTTEN}; DROP EXTENSION pg_partman CASCADE")

        run_upkeep(database_url)

        assert doctor(database_url) == (0, [])
        ((ahead,),) = execute(
            database_url, "SELECT min(ahead) FROM outbox.partition_health"
        )
        assert ahead == FEW_DAYS

    def test_a_pg_partman_of_others_is_left_alone(
        self, database_url: str, doctor: Doctor
    ) -> None:
        migrate_for_a_week(database_url, partman_schema=None)
        with new_role(database_url, "somebody"):
            execute(
                database_url,
                "ALTER SCHEMA partman OWNER TO somebody;"
                " REVOKE ALL ON SCHEMA partman FROM pillarbox_owner;"
                " UPDATE pg_extension SET extversion = '4.6.2'"
                " WHERE extname = 'pg_partman'",
            )
            migrate_for_a_week(database_url, partman_schema=None)
            run_upkeep(database_url)

            assert doctor(database_url) == (0, [])
