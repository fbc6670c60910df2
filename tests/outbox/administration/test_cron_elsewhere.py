"""A role that may own jobs of pg_cron in other databases outlives the schema."""

import re
import subprocess

import pytest

from pillarbox.outbox.administration.migrate import migration_sql
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import migrate_for_a_week, removal
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

ROLES = "SELECT rolname FROM pg_roles WHERE rolname LIKE 'pillarbox%' ORDER BY 1"
MEMBERS_OF_OTHERS = (
    "SELECT r.rolname FROM pg_auth_members m JOIN pg_roles r ON r.oid = m.member"
    " WHERE r.rolname LIKE 'pillarbox%'"
)
KEPT = [("pillarbox_detacher",), ("pillarbox_maintainer",)]
# A launcher that finds a job whose role is gone exits right after its start.
LAUNCHER = (
    "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'"
    " AND backend_start < now() - interval '2 seconds'"
)


def test_a_role_that_can_own_a_job_outlives_the_schema(
    private_server: PostgresServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = private_server
    private_server.create_database("bank")
    bank = server.database_url("bank")
    migrate_for_a_week(bank)
    execute(
        server.url,
        "CREATE EXTENSION pg_cron; SELECT cron.schedule_in_database("
        "'its upkeep', '7 * * * *', 'CALL outbox.maintain()', 'bank',"
        " 'pillarbox_maintainer')",
    )

    assert main(removal(bank)) == 0

    assert execute(bank, ROLES) == KEPT
    assert execute(bank, MEMBERS_OF_OTHERS) == []
    server.restart()
    wait_for("launcher", lambda: execute(server.url, LAUNCHER), seconds=60)
    said = capsys.readouterr().err
    remedies = re.findall(r"in the database of pg_cron, run: (.*)", said)
    assert len(remedies) == 2
    for remedy in remedies:
        paste(server.url, remedy)
    assert execute(bank, ROLES) == []
    assert execute(server.url, "SELECT jobname FROM cron.job") == []
    server.restart()
    wait_for("launcher", lambda: execute(server.url, LAUNCHER), seconds=60)


def test_the_printed_removal_keeps_roles_with_jobs_of_other_databases(
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

    done = subprocess.run(
        ["psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", url],
        input=migration_sql(remove=True),
        capture_output=True,
        text=True,
        check=True,
    )

    assert execute(url, "SELECT jobname FROM cron.job") == [("its upkeep",)]
    assert execute(url, ROLES) == KEPT
    assert done.stderr.count("is kept: it may own pg_cron jobs") == 2
