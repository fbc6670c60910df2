"""The SQL in the documentation for DBAs works in the roles that it names."""

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.migrations.statements import split_statements
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import reader
from tests.outbox.administration.test_doctor_of_jobs import LAUNCHER
from tests.outbox.administration.test_upkeep import TABLES, add_old, old_partition

DOCS: Final = Path(__file__).parents[3] / "docs"
FAILED: Final = (
    "INSERT INTO cron.job_run_details (jobid, runid, status, command, return_message,"
    " username, start_time) SELECT jobid, 1, 'failed', command, 'no lock', username,"
    " now() FROM cron.job WHERE jobname LIKE 'pillarbox upkeep %%'"
)


def blocks(page: str, start: str, end: str) -> list[str]:
    """Return the SQL blocks in a part of a page."""
    text = (DOCS / page).read_text()
    part = text[text.index(start) :]
    part = part[: part.index(end, len(start))]
    return re.findall(r"```sql\n(.*?)```", part, re.DOTALL)


def in_psql(url: str, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["psql", "-X", url], input=script, capture_output=True, text=True, check=False
    )


@pytest.fixture
def alarms_url(scheduled_server: PostgresServer) -> str:
    """Return the URL of a database with pg_cron's jobs, for a role without grants."""
    url = scheduled_server.url
    execute(url, "CREATE ROLE my_alarms LOGIN")
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    return url.replace("postgres@", "my_alarms@")


def test_alarms_are_reported_to_the_monitor(
    scheduled_server: PostgresServer, alarms_url: str
) -> None:
    health, launcher, _ = blocks("database.md", "## What to alarm on", "\n## ")
    upkeep, partitions, _, backlog = split_statements(health)
    execute(scheduled_server.url, "GRANT pillarbox_monitor TO my_alarms")

    assert execute(alarms_url, upkeep) == []
    assert main(["maintain", "--database", scheduled_server.url]) == 0
    assert len(execute(alarms_url, upkeep)) == 1
    assert len(execute(alarms_url, partitions)) == len(TABLES)
    assert execute(alarms_url, backlog) == [(None,)]
    execute(scheduled_server.url, "GRANT pg_monitor TO my_alarms")
    assert len(execute(alarms_url, launcher)) == 1


def test_the_error_of_a_job_is_visible_after_set_role(
    scheduled_server: PostgresServer, alarms_url: str
) -> None:
    *_, runs = blocks("database.md", "## What to alarm on", "\n## ")
    _, look, _ = split_statements(runs)
    execute(scheduled_server.url, FAILED)
    execute(scheduled_server.url, "GRANT pillarbox_maintainer TO my_alarms")

    assert "no lock" in in_psql(alarms_url, runs).stdout
    assert "no lock" not in in_psql(alarms_url, look).stdout


def test_the_documented_job_archives_and_drops_what_the_policy_keeps(
    database_url: str,
) -> None:
    url = database_url
    create, job = blocks("database.md", "### Archiving", "**By hand.**")
    assert in_psql(url, create).stderr == ""
    assert main(["retention", "keep-table", "outbox.message", "--database", url]) == 0
    old_partition(url)
    add_old(url, outcome="published")
    assert main(["maintain", "--database", url]) == 0
    kept = "SELECT to_regclass(partition) IS NOT NULL FROM outbox.kept_partition"
    assert set(execute(url, kept)) == {(True,)}

    # The second run comes before the upkeep has removed the notes.
    assert [in_psql(url, job).stderr for _ in range(2)] == ["", ""]

    assert set(execute(url, kept)) == {(False,)}
    assert execute(url, "SELECT topic FROM archive.message") == [("t",)]
    positions = "SELECT messages, deferred FROM archive.position"
    assert execute(url, positions) == [(1, 0)]
    old_partition(url, 25)
    assert main(["maintain", "--database", url]) == 0
    assert set(execute(url, kept)) == {(True,)}


def test_a_lock_timeout_is_an_ordinary_error_and_the_session_continues(
    database_url: str,
) -> None:
    (trial,) = blocks("managed-services.md", "**AlloyDB.**", "**Cloud SQL.**")
    with reader(database_url):
        done = in_psql(database_url, f"{trial} SELECT 'still there';")

    assert "ERROR:  canceling statement due to lock timeout" in done.stderr
    assert "still there" in done.stdout
