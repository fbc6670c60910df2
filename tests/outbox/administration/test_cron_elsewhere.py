"""pg_cron runs in a different database of the server than ours."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from outbox.administration.migrate import migration_sql, unmigrate
from outbox.cli.main import main
from outbox.testing.cluster import private_cluster
from outbox.testing.postgres import PostgresServer
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import (
    SETTINGS,
    copied_server,
    migrate_for_a_week,
    removal,
)
from tests.fixtures.sessions import execute, session
from tests.fixtures.waiting import wait_for

ROLES = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'pillarbox%' ORDER BY 1"
MEMBERS_OF_OTHERS = (
    "SELECT r.rolname FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.member"
    " WHERE r.rolname LIKE 'pillarbox%'"
)
# A launcher that finds a job whose role is gone exits right after its start.
LAUNCHER = (
    "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'"
    " AND backend_start < now() - interval '2 seconds'"
)


@pytest.fixture(scope="module")
def data() -> Iterator[Path]:
    """The directory of a stopped server whose pg_cron runs in another database."""
    with private_cluster(SETTINGS, durable=False) as cluster:
        execute(cluster.url, "CREATE DATABASE bank")
        migrate_for_a_week(PostgresServer(cluster.url).database_url("bank"))
        session.end()
        cluster.stop("fast")
        yield cluster.data


@pytest.fixture
def its_server(data: Path) -> Iterator[PostgresServer]:
    with copied_server(data) as running:
        yield running


@pytest.fixture
def elsewhere(its_server: PostgresServer) -> str:
    """The migrated database."""
    return its_server.database_url("bank")


@pytest.fixture
def scheduled(its_server: PostgresServer, elsewhere: str) -> str:
    """Schedule a job of one of our roles from pg_cron's database; return the other."""
    execute(
        its_server.url,
        "CREATE EXTENSION IF NOT EXISTS pg_cron; SELECT cron.schedule_in_database("
        "'its upkeep', '7 * * * *', 'CALL outbox.maintain()', 'bank',"
        " 'pillarbox_maintainer')",
    )
    return elsewhere


@pytest.mark.parametrize("way", ["command", "psql"])
def test_a_role_that_can_own_a_job_outlives_the_schema(
    way: str,
    its_server: PostgresServer,
    scheduled: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = remove_schema(way, scheduled, capsys)

    assert execute(scheduled, ROLES) == [
        ("pillarbox_detacher",),
        ("pillarbox_maintainer",),
    ]
    assert execute(scheduled, MEMBERS_OF_OTHERS) == []
    its_server.restart()
    wait_for("launcher", lambda: execute(its_server.url, LAUNCHER), seconds=60)
    remedies = re.findall(r"in the database of pg_cron, run: (.*)", said)
    assert len(remedies) == 2
    for remedy in remedies:
        paste(its_server.url, remedy)
    assert execute(scheduled, ROLES) == []
    assert execute(its_server.url, "SELECT jobname FROM cron.job") == []
    its_server.restart()
    wait_for("launcher", lambda: execute(its_server.url, LAUNCHER), seconds=60)


def remove_schema(way: str, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Remove the schema, and return the standard error."""
    if way == "command":
        assert main(removal(url)) == 0
        return capsys.readouterr().err
    done = subprocess.run(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", url],
        input=migration_sql(remove=True),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_roles_that_may_have_jobs_are_kept_with_those_of_other_databases(
    private_server: PostgresServer,
) -> None:
    url = private_server.url
    private_server.create_database("bank")
    migrate_for_a_week(url)
    execute(url, "CREATE EXTENSION pg_cron")
    for job, database in (("pillarbox upkeep", "pillarbox"), ("its upkeep", "bank")):
        execute(
            url,
            "SELECT cron.schedule_in_database(%s, '7 * * * *',"
            " 'CALL outbox.maintain()', %s, 'pillarbox_maintainer')",
            (job, database),
        )
    said: list[str] = []

    unmigrate(url, tell=said.append)

    assert execute(url, "SELECT jobname FROM cron.job") == [("its upkeep",)]
    assert execute(url, ROLES) == [("pillarbox_detacher",), ("pillarbox_maintainer",)]
    assert all("is kept: it may own pg_cron jobs" in line for line in said)


def test_the_doctor_says_who_can_run_the_upkeep_and_passes_after_a_run(
    elsewhere: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", "--database", elsewhere]) == 1

    findings = json.loads(capsys.readouterr().out)["findings"]
    # Every role can connect to a test's database, and no relay is running.
    (found,) = (f for f in findings if f["severity"] != "hint")
    assert (found["check"], found["severity"]) == ("upkeep", "warning")
    assert "the upkeep has not run yet" in found["finding"]

    paste(elsewhere, found["remedy"])

    assert main(["doctor", "--database", elsewhere]) == 0
