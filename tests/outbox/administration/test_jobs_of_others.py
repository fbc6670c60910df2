"""pg_cron's jobs follow their database through a rename, a copy and a restore."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from outbox.testing.postgres import PostgresServer
from tests.fixtures.doctor import Doctor
from tests.fixtures.pasting import paste
from tests.fixtures.postgres import migrate
from tests.fixtures.sessions import execute, session
from tests.fixtures.waiting import wait_for

JOBS: Final = "SELECT jobname::text, database FROM cron.job ORDER BY jobname"
LAUNCHER: Final = (
    "SELECT 1 FROM pg_stat_activity WHERE backend_type = 'pg_cron launcher'"
)
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


def connect_to_nodes(server: PostgresServer) -> None:
    """Let pg_cron connect to the node of each job, instead of starting workers."""
    execute(server.url, "ALTER SYSTEM SET cron.use_background_workers = off")
    session.end()
    server.restart()


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


def test_jobs_restored_from_another_server_are_replaced(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    connect_to_nodes(scheduled_server)
    execute(url, "UPDATE cron.job SET nodeport = nodeport + 1")
    found = about_jobs(doctor(url)[1])
    assert len(found) == 3

    migrate(url)

    ports = "SELECT DISTINCT nodeport = current_setting('port')::int FROM cron.job"
    assert execute(url, ports) == [(True,)]
    assert about_jobs(doctor(url)[1]) == []


def test_migrate_leaves_jobs_of_others_alone_and_the_doctor_says_whose_they_are(
    scheduled_server: PostgresServer, doctor: Doctor
) -> None:
    url = scheduled_server.url
    connect_to_nodes(scheduled_server)

    def add(node: str, port: int, database: str) -> None:
        name = f"pillarbox upkeep of {database}, theirs"
        execute(url, STALE, (node, port, database, name))
        execute(url, f"UPDATE cron.job SET active = false WHERE jobname = '{name}'")

    migrate(url)  # the fixture's server has another port than the one that it copies
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
        " username, start_time, end_time) SELECT jobid, %s, 'failed', %s, username,"
        " now() - %s::interval, now() - %s::interval FROM cron.job"
        " WHERE jobname LIKE %s"
    )

    def ran(job: str, runid: int, said: str, ago: str | None) -> None:
        execute(url, run, (runid, said, ago, ago, f"pillarbox {job} of %"))

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
