"""pg_cron works in another database of the server than ours."""

import json

import pytest

from outbox.cli import main
from outbox.errors import MigrationError
from outbox.migrate import migrate
from outbox.testing.postgres import PostgresServer
from tests.fixtures.relay import execute
from tests.fixtures.waiting import wait_for

RUNS = "SELECT status, return_message FROM cron.job_run_details"


@pytest.fixture
def elsewhere(private_server: PostgresServer) -> str:
    """An empty database, beside the one in which pg_cron works."""
    private_server.create_database("bank")
    return private_server.database_url("bank")


@pytest.mark.slow
def test_the_job_of_the_refusal_s_hint_runs_the_upkeep(
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
        ("pillarbox upkeep", "CALL outbox.maintain()", "bank", "pillarbox_maintainer")
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


def test_the_doctor_is_content_once_the_upkeep_ran_and_says_who_may_drive_it(
    private_server: PostgresServer,
    elsewhere: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    migrate(elsewhere, with_cron=False)

    assert main(["doctor", "--json", "--database", elsewhere]) == 1

    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["check"], found["severity"]) == ("upkeep", "warning")
    assert "the upkeep has not run yet" in found["finding"]
    _, _, job = found["remedy"].partition("works in the database pillarbox: ")
    execute(private_server.url, "CREATE EXTENSION pg_cron")
    execute(private_server.url, job)
    ((command, database, role),) = execute(
        private_server.url, "SELECT command, database, username FROM cron.job"
    )
    assert (database, role) == ("bank", "pillarbox_maintainer")
    execute(elsewhere.replace("postgres@", f"{role}@"), command)

    assert main(["doctor", "--database", elsewhere]) == 0
