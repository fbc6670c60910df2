"""The printed SQL in two parts, one for an administrator and one for the owner."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

from pillarbox.outbox.administration.migrate import migrate, migration_sql, unmigrate
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.postgres import migrate_for_a_week
from tests.fixtures.roles import new_role
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
def developer(empty_database_url: str) -> Iterator[str]:
    """The empty database, as a role that is not an administrator."""
    with new_role(empty_database_url, "parted_developer") as name:
        yield empty_database_url.replace("postgres@", f"{name}@")
    execute(empty_database_url, "DROP ROLE parted_maintainer, parted_detacher")


def printed(part: str, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    options = ["--without-cron", "--role-prefix", PREFIX, *more]
    assert main(["migrate", "--sql", part, *options]) == 0
    return capsys.readouterr().out


@pytest.mark.long
def test_both_parts_make_the_same_schema_as_the_command(
    psql: Psql,
    developer: str,
    empty_database_url: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = empty_database_url
    administrator_s, owner_s = (printed(p, capsys) for p in ("administrator", "owner"))

    first = psql(url, administrator_s)
    assert (first.returncode, "ERROR" in first.stderr) == (0, False)
    # The part can be run again: after an upgrade of pg_partman it renews the grants.
    assert psql(url, administrator_s).returncode == 0
    early = psql(developer, owner_s)
    assert 'permission denied to set role "parted_owner"' in early.stderr
    execute(url, "GRANT parted_owner TO parted_developer")
    then = psql(developer, owner_s)
    assert (then.returncode, then.stderr) == (0, "")

    made = snapshot(url)
    # A superuser isn't to run what others can change.
    execute(url, "REVOKE parted_owner FROM parted_developer")
    migrate_for_a_week(url, role_prefix=PREFIX)
    execute(f"{url}?options=-crole%3Dparted_maintainer", "CALL outbox.maintain()")
    assert snapshot(url) == made

    unmigrate(url, role_prefix=PREFIX)
    assert is_empty(snapshot(url))
    roles = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'parted%' ORDER BY 1"
    # The job roles stay: pg_cron runs in another database.
    stay = [("parted_detacher",), ("parted_developer",), ("parted_maintainer",)]
    assert execute(url, roles) == stay
    migrate(url, with_cron=False, role_prefix=PREFIX)
    assert made == snapshot(url)
    unmigrate(url, role_prefix=PREFIX)


def test_the_jobs_belong_to_roles_of_their_own(
    private_server: PostgresServer, psql: Psql
) -> None:
    url = private_server.url

    for part in ("administrator", "owner"):
        done = psql(url, migration_sql(part=part))
        assert (done.returncode, "ERROR" in done.stderr) == (0, False)

    assert snapshot(url)["cron.job"] == [
        (f"pillarbox {task} of pillarbox", when, call, "pillarbox", f"pillarbox_{role}")
        for task, when, call, role in (
            (
                "plan detaches",
                "2 * * * *",
                "SELECT outbox.schedule_detaches()",
                "detacher",
            ),
            (
                "trim cron log",
                "23 3 * * *",
                "SELECT outbox.trim_cron_log()",
                "maintainer",
            ),
            ("upkeep", "7 * * * *", "CALL outbox.maintain()", "maintainer"),
        )
    ]
    unmigrate(url)
    assert is_empty(snapshot(url))


def test_invalid_parts_of_the_printed_sql_are_refused() -> None:
    with pytest.raises(ConfigError, match="part='dba': use administrator or owner"):
        migration_sql(part="dba")
    with pytest.raises(ConfigError, match="the removal has no parts"):
        migration_sql(part="owner", remove=True)
