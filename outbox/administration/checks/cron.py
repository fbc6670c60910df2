"""pg_cron, if it drives the upkeep: it runs, has pillarbox's jobs, and they succeed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final, NamedTuple

from psycopg import sql

from pillarbox.outbox.administration.check import (
    Finding,
    Installation,
    Severity,
    error,
    unknown,
    warning,
)
from pillarbox.outbox.administration.checks.by_statement import by_statement
from pillarbox.outbox.administration.checks.upkeep import (
    MAX_SILENCE,
    find_cron,
    read_upkeep,
)
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.logs.printable import STRING, for_sql
from pillarbox.outbox.postgres.sql_files import load

_UPKEEP: Final = "CALL outbox.maintain"
_PLAN: Final = "SELECT outbox.schedule_detaches"
_check_launcher: Final = by_statement(load("outbox", "check_launcher"))


class _Job(NamedTuple):
    """A job of pg_cron, as `list_jobs.sql` gives it."""

    jobid: int
    task: str | None
    foreign: str | None
    remedy: str
    active: bool
    succeeded_at: datetime | None
    has_run: bool
    failure: str | None
    is_failing: bool
    now: datetime


def check_cron(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find jobs that don't run or fail, unless something else drives the upkeep."""
    cron = find_cron(connection)
    if cron.is_lost:
        yield error(
            f"pg_cron is configured for the database {cron.home}, which doesn't"
            " exist, so no job on this server runs",
            f"ALTER SYSTEM SET cron.database_name = {for_sql(cron.here, STRING)};"
            f"  -- then restart the server, and run: {here.migrate}",
        )
    if not cron.is_here:
        return
    roles = [here.role("maintainer"), here.role("detacher")]
    jobs: dict[int, _Job] = {}
    rights = {}
    # A role sees only its own jobs.
    for role in (None, *roles):
        rights[role] = connection.execute(
            load("outbox", "may_see_jobs"), {"role": role}
        ).fetchone() or (False, False)
        if all(rights[role]):
            with _acting_as(connection, role):
                rows = connection.execute(
                    load("outbox", "list_jobs"),
                    {"roles": roles, "heeds_nodes": cron.heeds_nodes},
                )
                jobs |= {row[0]: _Job(*row) for row in rows}
    if not rights[None][1] and not jobs:
        yield unknown(
            "this role can't see the jobs of pg_cron",
            f"run pillarbox doctor as a superuser or as a member of {roles[0]}",
        )
        return
    for job in jobs.values():
        if job.foreign is not None:
            yield warning(job.foreign, job.remedy)
    ran = read_upkeep(connection)
    upkeep, plan = (
        next((job for job in jobs.values() if job.task == task), None)
        for task in (_UPKEEP, _PLAN)
    )
    may_see_jobs, _ = rights[roles[0]]
    if ran.is_fresh and may_see_jobs and not (upkeep and upkeep.active):
        return  # something else drives it
    with _acting_as(connection, None):
        found = list(_check_launcher(connection, here))
    yield from found
    if not ran.is_fresh:
        yield from _check_job(
            "pillarbox upkeep", upkeep, roles[0], rights[roles[0]], here
        )
    name = "pillarbox plan detaches"
    yield from _check_job(name, plan, roles[1], rights[roles[1]], here)
    # The plan runs every hour, five minutes before the upkeep.
    is_due = not ran.is_new or (upkeep is not None and upkeep.has_run)
    if plan is not None and plan.active and not plan.has_run and is_due:
        yield warning(
            f"the job {name!r} has never run",
            "SELECT * FROM cron.job_run_details ORDER BY runid DESC LIMIT 5;"
            "  -- do other jobs run? If it is new, wait for the next hour",
        )


@contextmanager
def _acting_as(
    connection: AdministrationConnection, role: str | None
) -> Iterator[None]:
    with connection.transaction():
        # pg_cron's policies show each role its own jobs.
        connection.execute("SET LOCAL row_security = on")
        if role is not None:
            connection.execute(
                sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role))
            )
        yield


def _check_job(
    name: str,
    job: _Job | None,
    role: str,
    rights: tuple[bool, ...],
    here: Installation,
) -> Iterator[Finding]:
    may_see_jobs, may_use_cron = rights
    if not may_see_jobs:
        yield unknown(
            f"only {role} can see whether the job {name!r} runs",
            f"run pillarbox doctor as a superuser or as a member of {role}",
        )
    elif not may_use_cron:
        yield error(
            f"{role} lacks USAGE on the schema cron: its jobs can't be seen or changed",
            f"GRANT USAGE ON SCHEMA cron TO {for_sql(role)};",
        )
    elif job is None:
        yield error(f"the job {name!r} doesn't exist", here.migrate)
    elif not job.active:
        yield error(
            f"the job {name!r} is inactive",
            f"UPDATE cron.job SET active = true WHERE jobid = {job.jobid};",  # noqa: S608 - for a person to read
        )
    elif job.has_run:
        at = job.succeeded_at
        is_late = at is None or job.now - at > MAX_SILENCE
        if not is_late and not job.is_failing:
            return
        last = "has never succeeded" if at is None else f"last succeeded at {at:%F %R}"
        remedy = (
            f"SELECT * FROM cron.job_run_details WHERE jobid = {job.jobid}"  # noqa: S608 - for a person to read
            " ORDER BY runid DESC LIMIT 5;"
        )
        if job.failure == "connection failed":
            remedy = (
                "ALTER SYSTEM SET cron.use_background_workers = on;  -- and raise"
                " max_worker_processes, then restart: the roles of the jobs have no"
                " password"
            )
        yield Finding(
            Severity.ERROR if is_late else Severity.WARNING,
            f"the job {name!r} {last}; its last failure: {job.failure}",
            remedy,
        )
