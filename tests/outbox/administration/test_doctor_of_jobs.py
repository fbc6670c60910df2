"""The doctor checks pg_cron: its launcher, our jobs, and their roles."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Final

import pytest

from pillarbox.outbox.cli.main import main
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import MigratedData, copied_server, migrate
from tests.fixtures.sessions import execute, session
from tests.fixtures.waiting import wait_for

LAUNCHER = "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'"


def test_a_stopped_pg_cron_launcher_is_found(
    migrated_data: MigratedData, doctor: Doctor
) -> None:
    data = migrated_data.directory(with_cron=True)
    with copied_server(data, max_worker_processes="0") as idle:
        findings = doctor(idle.url)[1]

    (found,) = (f for f in findings if "launcher" in f["finding"])
    assert (found["check"], found["severity"]) == ("cron", "error")
    assert "NOT IN (SELECT rolname FROM pg_roles)" in found["remedy"]


def test_a_job_whose_role_is_gone_stops_the_launcher_until_it_is_deleted(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    execute(
        url,
        "CREATE ROLE leaver LOGIN; GRANT USAGE ON SCHEMA cron TO leaver;"
        " SET ROLE leaver; SELECT cron.schedule('theirs', '0 0 1 1 *', 'SELECT 1');"
        " RESET ROLE; DROP OWNED BY leaver; DROP ROLE leaver",
    )
    (found,) = (
        f for f in doctor(url)[1] if "roles that no longer exist" in f["finding"]
    )
    wait_for("its end", lambda: not execute(url, LAUNCHER))

    paste(url, found["remedy"])

    wait_for("launcher", lambda: execute(url, LAUNCHER))
    assert doctor(url)[1] == []


def test_jobs_that_are_not_due_yet_are_not_reported(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    assert doctor(url) == (0, [])
    execute(url, "CALL outbox.maintain()")
    assert doctor(url) == (0, [])

    execute(url, "UPDATE outbox.upkeep SET awaited_at = now() - interval '4 hours'")
    status, (found,) = doctor(url)
    assert status == 1
    assert found["finding"] == "the job 'pillarbox plan detaches' has never run"


def test_missing_inactive_silent_or_failing_jobs_are_found(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    upkeep = "(SELECT jobid FROM cron.job WHERE jobname LIKE 'pillarbox upkeep of %%')"
    ran = (
        "INSERT INTO cron.job_run_details (jobid, runid, status, return_message,"
        f" username, start_time, end_time) SELECT {upkeep}, %s, %s, 'upkeep: no lock',"
        " 'pillarbox_maintainer', now() - %s, now() - %s"
    )

    def about_upkeep() -> list[dict[str, str]]:
        return [f for f in doctor(url)[1] if "'pillarbox upkeep'" in f["finding"]]

    hours, now = timedelta(hours=5), timedelta(0)
    execute(url, ran, (1, "succeeded", hours, hours))
    execute(url, ran, (2, "failed", hours, hours))
    (failing,) = about_upkeep()
    assert failing["severity"] == "error"
    assert "its last failure: upkeep: no lock" in failing["finding"]
    execute(url, "UPDATE cron.job_run_details SET return_message = 'connection failed'")
    (failing,) = about_upkeep()
    assert "cron.use_background_workers = on" in failing["remedy"]
    execute(url, "UPDATE cron.job_run_details SET return_message = 'upkeep: no lock'")
    (failing,) = about_upkeep()
    assert "no lock" in paste(url, failing["remedy"])
    execute(url, ran, (3, "succeeded", now, now))
    assert about_upkeep() == []
    execute(url, f"UPDATE cron.job SET active = false WHERE jobid = {upkeep}")
    (inactive,) = about_upkeep()
    assert "is inactive" in inactive["finding"]
    paste(url, inactive["remedy"])
    assert about_upkeep() == []
    execute(url, f"SELECT cron.unschedule({upkeep})")
    (missing,) = about_upkeep()
    assert "doesn't exist" in missing["finding"]
    paste(url, missing["remedy"])
    execute(url, "REVOKE USAGE ON SCHEMA cron FROM pillarbox_maintainer")
    (powerless,) = (
        f for f in doctor(url)[1] if "lacks USAGE on the schema cron" in f["finding"]
    )
    paste(url, powerless["remedy"])
    assert about_upkeep() == []
    # The monitor can't see jobs, and the doctor says so.
    findings = doctor(f"{url}?options=-crole%3Dpillarbox_monitor")[1]
    assert {f["severity"] for f in findings if f["check"] == "cron"} == {"unknown"}


JOBS: Final = "SELECT jobname::text, database FROM cron.job ORDER BY jobname"
STALE: Final = (
    "INSERT INTO cron.job (schedule, command, nodename, nodeport, database, username,"
    " jobname) SELECT schedule, command, %s, nodeport + %s, %s, username, %s"
    " FROM cron.job WHERE jobname = 'pillarbox upkeep of pillarbox'"
)


def jobs_of(name: str) -> list[tuple[str, str]]:
    return [
        (f"pillarbox {task} of {name}", name)
        for task in ("plan detaches", "trim cron log", "upkeep")
    ]


def about_jobs(findings: list[dict[str, str]]) -> list[dict[str, str]]:
    return [
        f
        for f in findings
        if f["check"] == "cron" and "is for the database" in f["finding"]
    ]


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
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    server = scheduled_server
    execute(server.url, "CALL outbox.maintain()")
    with home_of_cron(server, "bazaar"):
        lost = next(f for f in doctor(server.url)[1] if f["check"] == "cron")
        assert "bazaar, which doesn't exist" in lost["finding"]
        assert "cron.database_name = 'pillarbox'" in lost["remedy"]
        session.end()
        execute(
            server.database_url("template1"),
            "ALTER DATABASE pillarbox RENAME TO bazaar",
        )
        renamed = server.database_url("bazaar")
        assert execute(renamed, JOBS) == [
            (name, "pillarbox") for name, _ in jobs_of("pillarbox")
        ]
        # The upkeep is fresh, and its jobs fail nevertheless.
        found = about_jobs(doctor(renamed)[1])
        assert len(found) == 3
        assert (
            "of pillarbox_maintainer is for the database pillarbox"
            in (found[0]["finding"])
        )

        migrate(renamed)

        assert execute(renamed, JOBS) == jobs_of("bazaar")
        assert about_jobs(doctor(renamed)[1]) == []


def test_a_copy_leaves_the_jobs_of_its_original_and_the_doctor_names_them(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    server = scheduled_server
    copy = server.database_url("copy")
    with home_of_cron(server, "copy"):
        server.create_database("copy", "pillarbox")
        migrate(copy)
        assert execute(copy, JOBS) == sorted(jobs_of("copy") + jobs_of("pillarbox"))
        found = about_jobs(doctor(copy)[1])
        assert [f["severity"] for f in found] == ["warning"] * 3

        for finding in found:
            paste(copy, finding["remedy"])

        assert execute(copy, JOBS) == jobs_of("copy")
        assert about_jobs(doctor(copy)[1]) == []


def test_jobs_of_another_server_are_replaced_if_they_are_ours_and_named_if_not(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    # Let pg_cron connect to the node of each job, instead of starting workers.
    execute(url, "ALTER SYSTEM SET cron.use_background_workers = off")
    session.end()
    scheduled_server.restart()
    # The fixture's server has another port than the one that it copies.
    assert len(about_jobs(doctor(url)[1])) == 3

    migrate(url)

    ports = "SELECT DISTINCT nodeport = current_setting('port')::int FROM cron.job"
    assert execute(url, ports) == [(True,)]

    def add(node: str, port: int, database: str) -> None:
        name = f"pillarbox upkeep of {database}, theirs"
        execute(url, STALE, (node, port, database, name))
        execute(url, f"UPDATE cron.job SET active = false WHERE jobname = '{name}'")

    add("localhost", 1, "elsewhere")
    add("localhost", 0, "template1")
    migrate(url)
    assert len(execute(url, JOBS)) == 5
    add("db.example.org", 0, "pillarbox")
    found = about_jobs(doctor(url)[1])
    assert len(found) == 3
    for whose in (
        *("elsewhere at localhost:", "template1 at localhost:"),
        "pillarbox at db.example.org:",
    ):
        (about,) = (f for f in found if f"for the database {whose}" in f["finding"])
        assert "(inactive)" in about["finding"]

        paste(url, about["remedy"])

    assert execute(url, JOBS) == jobs_of("pillarbox")
    assert about_jobs(doctor(url)[1]) == []


def test_a_run_that_could_not_connect_is_the_last_failure_and_is_trimmed(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    wait_for("launcher", lambda: execute(url, LAUNCHER))
    run = (
        "INSERT INTO cron.job_run_details (jobid, runid, status, return_message,"
        " username, start_time, end_time) SELECT jobid, %s, %s, %s, username,"
        " now() - %s::interval, now() - %s::interval FROM cron.job"
        " WHERE jobname LIKE %s"
    )

    def ran(job: str, runid: int, said: str, ago: str | None) -> None:
        status = "succeeded" if said == "" else "failed"
        execute(url, run, (runid, status, said, ago, ago, f"pillarbox {job} of %"))

    def failures_of_jobs() -> list[dict[str, str]]:
        return [f for f in doctor(url)[1] if f["check"] == "cron"]

    for job, first in (("upkeep", 0), ("plan detaches", 10)):
        ran(job, first + 1, "connection failed", None)
        ran(job, first + 2, "long ago", "15 days")
        ran(job, first + 3, "connection failed", None)
        ran(job, first + 4, "permission denied", "1 hour")
    found = failures_of_jobs()
    assert len(found) == 2
    for failure in found:
        assert "its last failure: permission denied" in failure["finding"]

    for role in ("maintainer", "detacher"):
        execute(
            f"{url}?options=-crole%3Dpillarbox_{role}", "SELECT outbox.trim_cron_log()"
        )

    left = "SELECT runid FROM cron.job_run_details ORDER BY runid"
    assert execute(url, left) == [(3,), (4,), (13,), (14,)]
    # Once the upkeep is fresh, only the plan's failures matter, and those at once.
    execute(url, "CALL outbox.maintain()")
    ran("plan detaches", 15, "", "0")
    ran("plan detaches", 16, "connection failed", None)
    (failure,) = failures_of_jobs()
    assert failure["severity"] == "warning"
    assert "its last failure: connection failed" in failure["finding"]


def test_the_monitor_sees_whether_the_upkeep_runs_and_who_sees_the_jobs(
    scheduled_server: PostgresServer,
    doctor: Doctor,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = scheduled_server.url
    execute(
        url,
        "CREATE ROLE watcher LOGIN IN ROLE pillarbox_monitor, pg_monitor",
    )
    watching = url.replace("postgres@", "watcher@")
    assert watching != url
    assert main(["status", "--database", watching]) == 0
    assert "permission denied" not in capsys.readouterr().out
    execute(url, "CALL outbox.maintain()")
    status, (found,) = doctor(watching)
    assert (status, found["check"], found["severity"]) == (4, "cron", "unknown")
    assert "a member of pillarbox_maintainer" in found["remedy"]
