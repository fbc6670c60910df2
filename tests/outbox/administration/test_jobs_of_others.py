"""pg_cron's jobs follow their database through a rename, a copy and a restore."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.postgres import migrate
from tests.fixtures.sessions import execute, session
from tests.fixtures.waiting import wait_for

JOBS: Final = "SELECT jobname::text, database FROM cron.job ORDER BY jobname"
LAUNCHER: Final = (
    "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'"
)


def jobs_in(name: str) -> list[tuple[str, str]]:
    return [(f"pillarbox {task}", name) for task in ("plan detaches", "upkeep")]


@contextmanager
def home_of_cron(server: PostgresServer, database: str) -> Iterator[None]:
    """Let pg_cron work in another database, as its DBA would after a rename."""
    session.end()
    with_admin = server.database_url("template1")
    execute(with_admin, f"ALTER SYSTEM SET cron.database_name = '{database}'")
    session.end()
    server.restart()
    yield


def test_migrate_gives_the_jobs_to_a_renamed_database(
    scheduled_server: PostgresServer,
) -> None:
    server = scheduled_server
    with home_of_cron(server, "bazaar"):
        execute(
            server.database_url("template1"),
            "ALTER DATABASE pillarbox RENAME TO bazaar",
        )
        renamed = server.database_url("bazaar")
        assert execute(renamed, JOBS) == jobs_in("pillarbox")

        migrate(renamed)

        assert execute(renamed, JOBS) == jobs_in("bazaar")


def test_jobs_restored_from_another_server_are_replaced(
    scheduled_server: PostgresServer,
) -> None:
    url = scheduled_server.url
    execute(url, "UPDATE cron.job SET nodeport = nodeport + 1")

    migrate(url)

    ports = "SELECT DISTINCT nodeport = current_setting('port')::int FROM cron.job"
    assert execute(url, ports) == [(True,)]
    assert execute(url, JOBS) == jobs_in("pillarbox")


def test_a_run_that_could_not_connect_is_the_last_failure_and_is_trimmed(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    run = (
        "INSERT INTO cron.job_run_details (jobid, runid, status, return_message,"
        " username, start_time, end_time) SELECT jobid, %s, 'failed', %s, username,"
        " now() - %s::interval, now() - %s::interval FROM cron.job"
        " WHERE jobname LIKE %s"
    )

    def ran(job: str, runid: int, said: str, ago: str | None) -> None:
        execute(url, run, (runid, said, ago, ago, f"pillarbox {job}"))

    for job, first in (("upkeep", 0), ("plan detaches", 10)):
        ran(job, first + 1, "connection failed", None)
        ran(job, first + 2, "long ago", "15 days")
        ran(job, first + 3, "connection failed", None)
        ran(job, first + 4, "permission denied", "1 hour")
    found = [f["finding"] for f in doctor(url)[1] if f["check"] == "cron"]
    assert len(found) == 2
    assert all("its last failure: permission denied" in it for it in found)

    left = "SELECT runid FROM cron.job_run_details ORDER BY runid"
    for role in ("maintainer", "detacher"):
        execute(
            f"{url}?options=-crole%3Dpillarbox_{role}", "SELECT outbox.trim_cron_log()"
        )

    assert execute(url, left) == [(3,), (4,), (13,), (14,)]


def test_the_last_failure_of_the_plan_is_reported_at_once(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    execute(url, "CALL outbox.maintain()")
    run = (
        "INSERT INTO cron.job_run_details (jobid, runid, status, return_message,"
        " username, start_time, end_time) SELECT jobid, %s, %s, 'connection failed',"
        " username, %s, %s FROM cron.job WHERE jobname LIKE 'pillarbox plan %%'"
    )
    now: Any = execute(url, "SELECT now()")[0][0]
    execute(url, run, (1, "succeeded", now, now))
    execute(url, run, (2, "failed", None, None))

    (found,) = (f for f in doctor(url)[1] if f["check"] == "cron")

    assert found["severity"] == "warning"
    assert "its last failure: connection failed" in found["finding"]
