"""The printed SQL in two parts, one for an administrator and one for the owner."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from outbox.administration.migrate import migrate, migration_sql, unmigrate
from outbox.cli.main import main
from outbox.errors import ConfigError
from outbox.testing.postgres import PostgresServer
from tests.fixtures.sessions import execute
from tests.migrations.catalog import is_empty, snapshot

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]

Psql: TypeAlias = Callable[[str, str], "subprocess.CompletedProcess[str]"]
PREFIX = "parted"


@pytest.fixture
def psql(tmp_path: Path) -> Psql:
    """A function that runs a script in psql and returns its output."""

    def run(url: str, script: str) -> "subprocess.CompletedProcess[str]":
        file = tmp_path / "part.sql"
        file.write_text(script)
        return subprocess.run(
            ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", file, url],
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture
def developer(server: PostgresServer, empty_database_url: str) -> Iterator[str]:
    """The empty database, as a role that is not an administrator."""
    execute(server.url, "CREATE ROLE parted_developer LOGIN")
    yield empty_database_url.replace("postgres@", "parted_developer@")
    execute(empty_database_url, "DROP OWNED BY parted_developer CASCADE")
    execute(server.url, "DROP ROLE parted_developer")
    execute(server.url, "DROP ROLE IF EXISTS parted_maintainer, parted_detacher")


def printed(part: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    options = ["--without-cron", "--role-prefix", PREFIX, *more]
    assert main(["migrate", "--sql", "--part", part, *options]) == 0
    return capsys.readouterr().out


def test_both_parts_make_the_same_schema_as_the_command(
    psql: Psql,
    developer: str,
    empty_database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    administrator_s, owner_s = (printed(p, capsys) for p in ("administrator", "owner"))

    first = psql(empty_database_url, administrator_s)
    assert (first.returncode, "ERROR" in first.stderr) == (0, False)
    early = psql(developer, owner_s)
    assert 'permission denied to set role "parted_owner"' in early.stderr
    execute(empty_database_url, "GRANT parted_owner TO parted_developer")
    then = psql(developer, owner_s)
    assert (then.returncode, then.stderr) == (0, "")

    made = snapshot(empty_database_url)
    unmigrate(empty_database_url, role_prefix=PREFIX)
    assert is_empty(snapshot(empty_database_url))
    migrate(empty_database_url, with_cron=False, role_prefix=PREFIX)
    assert made == snapshot(empty_database_url)
    unmigrate(empty_database_url, role_prefix=PREFIX)


def test_after_both_parts_the_command_changes_nothing_and_the_upkeep_runs(
    psql: Psql,
    developer: str,
    empty_database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert psql(empty_database_url, printed("administrator", capsys)).returncode == 0
    # The part can be run again: after an upgrade of pg_partman it renews the grants.
    assert psql(empty_database_url, printed("administrator", capsys)).returncode == 0
    execute(empty_database_url, "GRANT parted_owner TO parted_developer")
    assert psql(developer, printed("owner", capsys)).returncode == 0
    before = snapshot(empty_database_url)

    migrate(empty_database_url, with_cron=False, role_prefix=PREFIX)
    execute(
        f"{empty_database_url}?options=-crole%3Dparted_maintainer",
        "CALL outbox.maintain()",
    )

    assert snapshot(empty_database_url) == before
    unmigrate(empty_database_url, role_prefix=PREFIX)
    roles = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'parted%' ORDER BY 1"
    # The job roles stay: pg_cron runs in another database.
    stay = [("parted_detacher",), ("parted_developer",), ("parted_maintainer",)]
    assert execute(empty_database_url, roles) == stay


@pytest.mark.parametrize("part", ["administrator", "owner"])
def test_sql_for_another_version_changes_nothing(
    part: str,
    psql: Psql,
    empty_database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = printed(part, capsys, "--from", "0007")
    if part == "administrator":
        assert "print the SQL without --from" in psql(empty_database_url, script).stderr
        assert is_empty(snapshot(empty_database_url))
    migrate(empty_database_url, with_cron=False, role_prefix=PREFIX)
    execute(empty_database_url, "UPDATE outbox.alembic_version SET version_num = '6'")
    before = snapshot(empty_database_url)

    refused = psql(empty_database_url, script).stderr

    assert "updates version 0007, but the schema has version 6" in refused
    assert "print it with --from 6" in refused
    assert snapshot(empty_database_url) == before
    unmigrate(empty_database_url, role_prefix=PREFIX)


def test_at_the_newest_version_the_sql_restores_dropped_objects(
    psql: Psql, empty_database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    migrate(empty_database_url, with_cron=False, role_prefix=PREFIX)
    execute(
        empty_database_url,
        "DROP OWNED BY parted_relay; DROP ROLE parted_relay;"
        " REVOKE ALL ON inbox.receipt FROM parted_consumer",
    )

    for part in ("administrator", "owner"):
        done = psql(empty_database_url, printed(part, capsys, "--from", "0007"))
        assert (done.returncode, "ERROR" in done.stderr) == (0, False)

    may = "SELECT has_table_privilege(%s, %s, 'SELECT')"
    for who in (
        ("parted_relay", "outbox.message"),
        ("parted_consumer", "inbox.receipt"),
    ):
        assert execute(empty_database_url, may, who) == [(True,)]
    unmigrate(empty_database_url, role_prefix=PREFIX)


def test_the_jobs_belong_to_the_administrator(
    private_server: PostgresServer, psql: Psql
) -> None:
    url = private_server.url

    for part in ("administrator", "owner"):
        done = psql(url, migration_sql(part=part))
        assert (done.returncode, "ERROR" in done.stderr) == (0, False)

    jobs = snapshot(url)["cron.job"]
    assert {role for *_, role in jobs} == {
        "pillarbox_maintainer",
        "pillarbox_detacher",
    }
    unmigrate(url)
    assert is_empty(snapshot(url))


def test_invalid_options_of_the_printed_sql_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="part='dba': use administrator or owner"):
        migration_sql(part="dba")
    with pytest.raises(ConfigError, match="runs the whole removal"):
        migration_sql(part="owner", remove=True)
    with pytest.raises(ConfigError, match=r"outbox.alembic_version, one of 0007"):
        migration_sql(from_version="3")
    with pytest.raises(ConfigError, match="a removal doesn't need it"):
        migration_sql(from_version="0003", remove=True)

    assert main(["migrate", "--part", "owner", "--database", "postgresql://h/d"]) == 2
    assert "only printed SQL has parts; add --sql" in capsys.readouterr().err
    assert main(["migrate", "--from", "0003", "--database", "postgresql://h/d"]) == 2
    assert "only printed SQL needs it; add --sql" in capsys.readouterr().err
