"""pg_cron runs in a different database of the server than ours."""

import json
import re
import subprocess

import pytest

from outbox.administration.migrate import migrate, migration_sql, unmigrate
from outbox.cli.main import main
from outbox.errors import MigrationError
from outbox.testing.postgres import PostgresServer
from tests.fixtures.pasting import paste
from tests.fixtures.sessions import execute
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
RUNS = "SELECT status, return_message FROM cron.job_run_details"


@pytest.fixture
def elsewhere(private_server: PostgresServer) -> str:
    """Create an empty database on a server whose pg_cron runs in another one."""
    private_server.create_database("bank")
    return private_server.database_url("bank")


@pytest.mark.slow
def test_the_job_suggested_by_the_hint_runs_the_upkeep(
    private_server: PostgresServer, elsewhere: str
) -> None:
    with pytest.raises(MigrationError) as refused:
        migrate(elsewhere)
    _, _, hint = str(refused.value).partition('and run in database "pillarbox": ')
    assert hint.startswith("CREATE EXTENSION IF NOT EXISTS pg_cron; SELECT cron.")

    migrate(elsewhere, with_cron=False)
    execute(private_server.url, hint.replace("7 * * * *", "* * * * *"))

    jobs = "SELECT jobname, command, database, username FROM cron.job"
    assert execute(private_server.url, jobs) == [
        (
            "pillarbox maintain bank",
            "CALL outbox.maintain()",
            "bank",
            "pillarbox_maintainer",
        )
    ]
    execute(
        elsewhere,
        "UPDATE outbox.partition_policy SET premake = 9"
        " WHERE parent_table = 'outbox.message'",
    )
    ahead = (
        "SELECT ahead FROM outbox.partition_health"
        " WHERE parent_table = 'outbox.message' AND ahead >= 9"
    )
    wait_for("upkeep", lambda: execute(elsewhere, ahead), seconds=180, pause=0.5)
    wait_for(
        "run",
        lambda: execute(private_server.url, f"{RUNS} WHERE status = 'succeeded'"),
        seconds=120,
        pause=0.5,
    )
    failed = f"{RUNS} WHERE status = 'failed'"
    assert execute(private_server.url, failed) == []


@pytest.fixture
def scheduled(private_server: PostgresServer, elsewhere: str) -> str:
    """Create the job that the hint of the refusal suggests; return the database."""
    with pytest.raises(MigrationError) as refused:
        migrate(elsewhere)
    migrate(elsewhere, with_cron=False)
    execute(private_server.url, str(refused.value).partition('"pillarbox": ')[2])
    return elsewhere


@pytest.mark.parametrize("way", ["command", "psql"])
def test_a_role_that_can_own_a_job_outlives_the_schema(
    way: str,
    private_server: PostgresServer,
    scheduled: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = remove_schema(way, scheduled, capsys)

    assert execute(scheduled, ROLES) == [
        ("pillarbox_detacher",),
        ("pillarbox_maintainer",),
    ]
    assert execute(scheduled, MEMBERS_OF_OTHERS) == []
    private_server.restart()
    wait_for("launcher", lambda: execute(private_server.url, LAUNCHER), seconds=60)
    remedies = re.findall(r'in database "pillarbox", run: (.*)', said)
    assert len(remedies) == 2
    for remedy in remedies:
        paste(private_server.url, remedy)
    assert execute(scheduled, ROLES) == []
    assert execute(private_server.url, "SELECT jobname FROM cron.job") == []
    private_server.restart()
    wait_for("launcher", lambda: execute(private_server.url, LAUNCHER), seconds=60)


def remove_schema(way: str, url: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Remove the schema, and return the standard error."""
    if way == "command":
        assert main(["migrate", "--remove", "--yes", "--database", url]) == 0
        return capsys.readouterr().err
    done = subprocess.run(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", url],
        input=migration_sql(remove=True),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_with_pg_cron_a_role_is_removed_only_with_its_jobs(
    private_server: PostgresServer,
) -> None:
    url = private_server.url
    private_server.create_database("bank")
    migrate(url, with_cron=False)
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
    assert execute(url, ROLES) == [("pillarbox_maintainer",)]
    (line,) = said
    assert line.startswith('role "pillarbox_maintainer" is kept: it may own pg_cron')


def test_the_doctor_says_who_can_run_the_upkeep_and_passes_after_a_run(
    private_server: PostgresServer,
    elsewhere: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    migrate(elsewhere, with_cron=False)

    assert main(["doctor", "--json", "--database", elsewhere]) == 1

    findings = json.loads(capsys.readouterr().out)["findings"]
    # Every role can connect to a test's database, so the doctor gives a hint.
    (found,) = (f for f in findings if f["check"] != "locks")
    assert (found["check"], found["severity"]) == ("upkeep", "warning")
    assert "the upkeep has not run yet" in found["finding"]
    _, _, job = found["remedy"].partition("runs in the database pillarbox: ")
    execute(private_server.url, "CREATE EXTENSION pg_cron")
    execute(private_server.url, job)
    ((command, database, role),) = execute(
        private_server.url, "SELECT command, database, username FROM cron.job"
    )
    assert (database, role) == ("bank", "pillarbox_maintainer")
    execute(elsewhere.replace("postgres@", f"{role}@"), command)

    assert main(["doctor", "--database", elsewhere]) == 0
