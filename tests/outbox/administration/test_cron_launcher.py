"""pg_cron's own launcher runs the jobs that migrate creates, at full minutes."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Final, TypeAlias

import psycopg
import pytest

from pillarbox.outbox.testing.postgres import PostgresServer, postgres_server
from tests.fixtures.doctor import Doctor
from tests.fixtures.passwords import PASSWORD, set_password
from tests.fixtures.postgres import ADD_MAIN, NEVER, migrate
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.outbox.administration.retiring import EXPIRED, NOTED, PENDING, steps
from tests.outbox.administration.test_upkeep import (
    BREAK_A_CONDITION,
    add_old,
    drop_ahead,
    old_partition,
)

Runs: TypeAlias = dict[str, tuple[Any, ...]]

EVERY_MINUTE: Final = "* * * * *"
UPKEEP: Final = "pillarbox upkeep of pillarbox"
TRIM: Final = "pillarbox trim cron log of pillarbox"
PLAN: Final = "pillarbox plan detaches of pillarbox"

OLD_RUNS: Final = (
    "INSERT INTO cron.job_run_details (jobid, runid, username, start_time)"
    " SELECT -days, -row_number() OVER (), role, now() - days * interval '24 hours'"
    " FROM unnest(ARRAY['pillarbox_maintainer', 'pillarbox_detacher', 'another']) role,"
    " unnest(ARRAY[13, 15]) days"
)
RUNS: Final = (
    "SELECT DISTINCT ON (j.jobname) j.jobname, d.username, d.status, d.return_message"
    " FROM cron.job j JOIN cron.job_run_details d USING (jobid)"
    " WHERE d.status IN ('succeeded', 'failed') ORDER BY j.jobname, d.runid"
)
LEFT_OF_OLD_RUNS: Final = (
    "SELECT username, -jobid FROM cron.job_run_details WHERE jobid < 0 ORDER BY 1, 2"
)
DETACHES: Final = (
    "SELECT schedule, jobname FROM cron.job WHERE jobname LIKE 'pillarbox detach %'"
)
NO_DETACHES: Final = f"SELECT 1 WHERE NOT EXISTS ({DETACHES})"
DETACH_RUNS: Final = (
    "SELECT status, return_message FROM cron.job_run_details"
    " WHERE command LIKE 'ALTER TABLE outbox.message %CONCURRENTLY'"
)
DETACH_FAILURES: Final = f"{DETACH_RUNS} AND status = 'failed'"
RESET_THE_DATABASE_S: Final = (
    "ALTER ROLE pillarbox_detacher IN DATABASE pillarbox RESET statement_timeout"
)
ADD: Final = "SET statement_timeout = '30s'; SELECT outbox.add('t', '{}'::jsonb)"


@pytest.fixture
def four_minutes(pytestconfig: pytest.Config) -> None:
    """Skip a test that takes four minutes, unless --full is given."""
    if not pytestconfig.getoption("full"):
        pytest.skip("four minutes of pg_cron's: with --full")


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[list[PostgresServer]]:
    """Start servers with an expired partition, with and without pg_cron's workers."""
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                postgres_server(
                    settings={"cron.use_background_workers": workers},
                    durable=False,
                )
            )
            for workers in request.param
        ]
        for server in running:
            prepare(server.url)
        yield running


def prepare(url: str) -> None:
    migrate(url)
    execute(url, ADD_MAIN)
    # Without workers, the launcher connects as this role, and asks the environment.
    for password in PASSWORD.values():
        set_password(url, "pillarbox_detacher", password)
    execute(url, f"UPDATE cron.job SET schedule = '{NEVER}'")
    old_partition(url)
    add_old(url, outcome="published")


def schedule(url: str, when: str, *jobs: str) -> None:
    """Change when jobs run, but not their commands or roles."""
    execute(
        url,
        "UPDATE cron.job SET schedule = %s WHERE jobname = ANY (%s)",
        (when, list(jobs)),
    )


def first_runs(url: str, *jobs: str) -> Runs:
    """Return role, status and message of each job's first run; prevent a second one."""

    def all_ended() -> Runs:
        runs = {job: tuple(run) for job, *run in execute(url, RUNS)}
        return runs if runs.keys() >= set(jobs) else {}

    runs = wait_for("jobs by the launcher", all_ended, seconds=150)
    schedule(url, NEVER, *jobs)
    return runs


@pytest.mark.parametrize("servers", [("on", "off", "on")], indirect=True)
@pytest.mark.timeout(240)
def test_each_job_runs_as_its_role_and_a_failure_shows_as_failed(
    servers: list[PostgresServer], doctor: Doctor
) -> None:
    # In the same minute, one would leave expired partitions to the other.
    *maintained, planned = [server.url for server in servers]
    for url in maintained:
        drop_ahead(url)
        assert steps(url, "make") == ["make"]
        execute(url, BREAK_A_CONDITION)
        old_partition(url, table="inbox.job")
        schedule(url, EVERY_MINUTE, UPKEEP, TRIM)
    schedule(planned, EVERY_MINUTE, PLAN)
    for server in servers:
        execute(server.url, OLD_RUNS)

    runs_of_plan = first_runs(planned, PLAN)
    all_runs = [first_runs(url, UPKEEP, TRIM) for url in maintained]

    for url, runs in zip(maintained, all_runs, strict=True):
        assert runs[TRIM][:2] == ("pillarbox_maintainer", "succeeded")
        assert runs[UPKEEP][:2] == ("pillarbox_maintainer", "failed")
        assert 'column "no_such_column" does not exist' in runs[UPKEEP][2]
        # The failure did not prevent the rest of the upkeep.
        assert steps(url, "make") == []
        assert execute(url, LEFT_OF_OLD_RUNS) == [
            *(("another", 13), ("another", 15)),
            *(("pillarbox_detacher", 13), ("pillarbox_detacher", 15)),
            ("pillarbox_maintainer", 13),
        ]

        status, findings = doctor(url)
        assert status == 3
        never = "the job 'pillarbox upkeep' has never succeeded"
        (finding,) = (f for f in findings if never in f["finding"])
        assert (finding["check"], finding["severity"]) == ("cron", "error")
        assert 'column "no_such_column" does not exist' in finding["finding"]

    assert runs_of_plan[PLAN][:2] == ("pillarbox_detacher", "succeeded")
    assert ("pillarbox_detacher", 15) not in execute(planned, LEFT_OF_OLD_RUNS)
    ((when, _),) = execute(planned, DETACHES)
    assert when.partition(" ")[2] == "* * * *"
    assert execute(planned, "SELECT partition FROM outbox.retiring_partition")


@pytest.mark.fault
@pytest.mark.parametrize("servers", [("on", "on", "off")], indirect=True)
@pytest.mark.timeout(600)
def test_a_waiting_detach_continues_after_crash_timeout_and_new_plans(
    four_minutes: None, servers: list[PostgresServer]
) -> None:
    urls = crashed, late, patient = [server.url for server in servers]
    execute(late, "ALTER ROLE pillarbox_detacher SET statement_timeout = '30s'")
    execute(late, RESET_THE_DATABASE_S)
    with ExitStack() as stack:
        readers = [stack.enter_context(closing(connect(url))) for url in urls]
        for url in urls:
            schedule(url, EVERY_MINUTE, PLAN)
        for url in urls:
            wait_for("plan", partial(execute, url, DETACHES), seconds=150)
            schedule(url, NEVER, PLAN)
        for url in urls:
            wait_for("detach", partial(execute, url, PENDING), seconds=150)
            execute(url, ADD)

        servers[0].restart("immediate")
        (run,) = wait_for("the launcher", partial(execute, crashed, DETACH_FAILURES))
        assert run[1] == "server restarted"

        (run,) = wait_for("timeout", partial(execute, late, DETACH_FAILURES))
        assert "canceling statement due to statement timeout" in run[1]
        assert steps(late, "finalize", "detach") == ["finalize"]
        readers[1].rollback()

        for url in urls:
            schedule(url, EVERY_MINUTE, PLAN)
        moved = f"{DETACHES} AND schedule = '{NEVER}'"
        wait_for("30 February", partial(execute, patient, moved), seconds=150)
        assert execute(patient, PENDING) == [(1,)]
        execute(patient, ADD)
        readers[2].rollback()

    for url in urls:
        wait_for("the end", partial(execute, url, NO_DETACHES), seconds=150)
        assert execute(url, EXPIRED) == []
        assert execute(url, NOTED) == []
        # The detach was started only once.
        assert len(execute(url, DETACH_RUNS)) == 1
    ((status, _),) = execute(patient, DETACH_RUNS)
    assert status == "succeeded"


def connect(url: str) -> psycopg.Connection[Any]:
    """Return a session that is idle in a transaction that has read the table."""
    connection = psycopg.connect(url)
    connection.execute("SELECT count(*) FROM outbox.message")
    return connection
