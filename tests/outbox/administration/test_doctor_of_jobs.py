"""The doctor checks pg_cron: its launcher, our jobs, and their roles."""

from datetime import timedelta
from typing import Any

from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import AS_HERE, MigratedData, copied_server
from tests.fixtures.sessions import execute
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


def test_a_recreated_detacher_gets_its_job_back(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    execute(url, "DROP OWNED BY pillarbox_detacher; DROP ROLE pillarbox_detacher")
    assert "the role pillarbox_detacher doesn't exist" in {
        f["finding"] for f in doctor(url)[1]
    }

    paste(url, f"pillarbox migrate{AS_HERE}")

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

    def about_upkeep() -> list[Any]:
        found = [f for f in doctor(url)[1] if "'pillarbox upkeep'" in f["finding"]]
        return [f["severity"] for f in found] + [f["finding"] for f in found]

    def remedy_for_upkeep() -> str:
        (found,) = (f for f in doctor(url)[1] if "'pillarbox upkeep'" in f["finding"])
        return found["remedy"]

    assert about_upkeep() == []
    hours = timedelta(hours=5)
    execute(url, ran, (1, "succeeded", hours, hours))
    execute(url, ran, (2, "failed", hours, hours))
    severity, finding = about_upkeep()
    assert severity == "error"
    assert "its last failure: upkeep: no lock" in finding
    assert "no lock" in paste(url, remedy_for_upkeep())
    execute(url, ran, (3, "succeeded", timedelta(0), timedelta(0)))
    assert about_upkeep() == []
    execute(url, f"UPDATE cron.job SET active = false WHERE jobid = {upkeep}")
    assert "is inactive" in about_upkeep()[1]
    paste(url, remedy_for_upkeep())
    assert about_upkeep() == []
    execute(url, f"SELECT cron.unschedule({upkeep})")
    assert "doesn't exist" in about_upkeep()[1]
    paste(url, remedy_for_upkeep())
    assert about_upkeep() == []
    execute(url, "REVOKE USAGE ON SCHEMA cron FROM pillarbox_maintainer")
    (found,) = (
        f for f in doctor(url)[1] if "lacks USAGE on the schema cron" in f["finding"]
    )
    paste(url, found["remedy"])
    assert about_upkeep() == []
    # The monitor can't see jobs, and the doctor says so.
    findings = doctor(f"{url}?options=-crole%3Dpillarbox_monitor")[1]
    jobs = [f for f in findings if f["check"] == "cron"]
    assert {f["severity"] for f in jobs} == {"unknown"}
