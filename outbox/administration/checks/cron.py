"""pg_cron, if it drives the upkeep: it runs, has pillarbox's jobs, and they succeed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Final, NamedTuple

from psycopg import sql

from outbox.administration.check import Finding, Installation, Severity, error, unknown
from outbox.administration.checks.upkeep import (
    MAX_SILENCE,
    is_home_of_cron,
    is_standby,
    read_upkeep,
)
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load

_UPKEEP: Final = "pillarbox upkeep"
_PLAN: Final = "pillarbox plan detaches"


class _Job(NamedTuple):
    """A job of pg_cron, as `read_job.sql` gives it."""

    jobid: int
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
    if not is_home_of_cron(connection):
        return
    ran = read_upkeep(connection)
    upkeep = _read_job(connection, _UPKEEP, here.role("maintainer"))
    is_hidden = isinstance(upkeep, Finding) and upkeep.severity is Severity.UNKNOWN
    is_driven = isinstance(upkeep, _Job) and upkeep.active
    if ran.is_fresh and not is_driven and not is_hidden:
        return  # something else drives it
    yield from _check_launcher(connection)
    if not ran.is_fresh:
        yield from _check_job(_UPKEEP, upkeep, here)
    plan = _read_job(connection, _PLAN, here.role("detacher"))
    yield from _check_job(_PLAN, plan, here)
    # The plan runs every hour, five minutes before the upkeep.
    is_due = not ran.is_new or (isinstance(upkeep, _Job) and upkeep.has_run)
    if isinstance(plan, _Job) and plan.active and not plan.has_run and is_due:
        yield Finding(
            Severity.WARNING,
            f"the job {_PLAN!r} has never run",
            "SELECT * FROM cron.job_run_details ORDER BY runid DESC LIMIT 5;"
            "  -- do other jobs run? If it is new, wait for the next hour",
        )


def _read_job(
    connection: AdministrationConnection, name: str, role: str
) -> _Job | Finding | None:
    """Return the job, None if it doesn't exist, or why it can't be seen."""
    may_see_jobs, may_use_cron = connection.execute(
        load("outbox", "may_see_jobs"), {"role": role}
    ).fetchone() or (False, False)
    if not may_see_jobs:
        return unknown(
            f"only {role} can see whether the job {name!r} runs",
            f"run pillarbox doctor as a superuser or as a member of {role}",
        )
    if not may_use_cron:
        return error(
            f"{role} lacks USAGE on the schema cron: its jobs can't be seen or changed",
            f'GRANT USAGE ON SCHEMA cron TO "{role}";',
        )
    with _seeing_jobs(connection, role):
        row = connection.execute(load("outbox", "read_job"), {"job": name}).fetchone()
    return None if row is None else _Job(*row)


@contextmanager
def _seeing_jobs(
    connection: AdministrationConnection, role: str | None = None
) -> Iterator[None]:
    with connection.transaction():
        # pg_cron's policies show each role its own jobs.
        connection.execute("SET LOCAL row_security = on")
        if role is not None:
            connection.execute(
                sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(role))
            )
        yield


def _check_launcher(connection: AdministrationConnection) -> Iterator[Finding]:
    with _seeing_jobs(connection):
        launchers, orphans = connection.execute(
            load("outbox", "count_launchers")
        ).fetchall()[0]
    # A standby has the jobs of its primary, but no launcher.
    if not is_standby(connection) and (orphans or not launchers):
        why = (
            f": {orphans} jobs belong to roles that no longer exist" if orphans else ""
        )
        yield error(
            f"the pg_cron launcher isn't running, so no job of this server runs{why}",
            "DELETE FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles);"
            "  -- if it still isn't running, restart the server, and read its log",
        )


def _check_job(
    name: str, job: _Job | Finding | None, here: Installation
) -> Iterator[Finding]:
    match job:
        case Finding():
            yield job
        case None:
            yield error(f"the job {name!r} doesn't exist", here.migrate)
        case _Job(active=False):
            yield error(
                f"the job {name!r} is inactive",
                f"UPDATE cron.job SET active = true WHERE jobid = {job.jobid};",  # noqa: S608 - for a person to read
            )
        case _Job(has_run=True, succeeded_at=at):
            is_late = at is None or job.now - at > MAX_SILENCE
            if is_late or job.is_failing:
                last = f"last succeeded at {at:%F %R}" if at else "has never succeeded"
                yield Finding(
                    Severity.ERROR if is_late else Severity.WARNING,
                    f"the job {name!r} {last}; its last failure: {job.failure}",
                    f"SELECT * FROM cron.job_run_details WHERE jobid = {job.jobid}"  # noqa: S608 - for a person to read
                    " ORDER BY runid DESC LIMIT 5;",
                )
