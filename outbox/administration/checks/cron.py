"""pg_cron, if it drives the upkeep: it runs, has pillarbox's jobs, and they succeed."""

from collections.abc import Iterator
from datetime import datetime
from typing import Final, NamedTuple

from psycopg import sql

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.checks.upkeep import (
    MAX_SILENCE,
    find_cron,
    is_standby,
    read_upkeep,
)
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load

_UPKEEP: Final = "pillarbox upkeep"
_PLAN: Final = "pillarbox plan detaches"


class _Job(NamedTuple):
    jobid: int
    active: bool
    succeeded_at: datetime | None
    has_run: bool
    now: datetime
    failure: str | None


class _Sight(NamedTuple):
    """What this role can see of a job, if anything."""

    name: str
    role: str
    may_look: bool
    may_use_cron: bool = False
    job: _Job | None = None

    @property
    def drives_nothing(self) -> bool:
        return self.may_look and not (self.job and self.job.active)


def check_cron(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find jobs that don't run or fail, unless something else drives the upkeep."""
    if not find_cron(connection).is_here:
        return
    ran = read_upkeep(connection)
    upkeep = _look(connection, _UPKEEP, here.role("maintainer"))
    if ran.is_fresh and upkeep.drives_nothing:
        return
    (orphans,) = connection.execute(load("outbox", "count_orphan_jobs")).fetchone() or (
        0,
    )
    launchers = connection.execute(load("outbox", "count_launchers")).fetchone()
    # A standby has the jobs of its primary, but no launcher.
    if not is_standby(connection) and (orphans or launchers == (0,)):
        why = (
            f": {orphans} jobs belong to roles that no longer exist" if orphans else ""
        )
        yield _found(
            Severity.ERROR,
            f"the pg_cron launcher isn't running, so no job of this server runs{why}",
            "DELETE FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles);"
            "  -- if it still isn't running, restart the server, and read its log",
        )
    if not ran.is_fresh:
        yield from _judge(upkeep, here.migrate)
    plan = _look(connection, _PLAN, here.role("detacher"))
    yield from _judge(plan, here.migrate)
    # The plan runs every hour, five minutes before the upkeep.
    is_due = not ran.is_new or (upkeep.job is not None and upkeep.job.has_run)
    if plan.job is not None and plan.job.active and not plan.job.has_run and is_due:
        yield _found(
            Severity.WARNING,
            f"the job {_PLAN!r} has never run",
            "SELECT * FROM cron.job_run_details ORDER BY start_time DESC LIMIT 5;"
            "  -- do other jobs run? If it is new, wait for the next hour",
        )


def _look(connection: AdministrationConnection, name: str, role: str) -> _Sight:
    # A role sees only its own jobs.
    asked = {"role": role}
    may_look = connection.execute(load("outbox", "may_become"), asked).fetchone()
    if may_look != (True,):
        return _Sight(name, role, may_look=False)
    may_use = connection.execute(load("outbox", "may_use_cron"), asked).fetchone()
    if may_use != (True,):
        return _Sight(name, role, may_look=True)
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
    try:
        row = connection.execute(load("outbox", "read_job"), {"job": name}).fetchone()
    finally:
        connection.execute("RESET ROLE")
    return _Sight(name, role, True, True, None if row is None else _Job(*row))


def _judge(sight: _Sight, migrate: str) -> Iterator[Finding]:
    name, role, job = sight.name, sight.role, sight.job
    if not sight.may_look:
        yield _found(
            Severity.UNKNOWN,
            f"only {role} can see whether the job {name!r} runs",
            f"run pillarbox doctor as a superuser or as a member of {role}",
        )
    elif not sight.may_use_cron:
        yield _found(
            Severity.ERROR,
            f"{role} lacks USAGE on the schema cron: its jobs can't be seen or changed",
            f'GRANT USAGE ON SCHEMA cron TO "{role}";',
        )
    elif job is None:
        yield _found(Severity.ERROR, f"the job {name!r} doesn't exist", migrate)
    elif not job.active:
        yield _found(
            Severity.ERROR,
            f"the job {name!r} is inactive",
            f"UPDATE cron.job SET active = true WHERE jobid = {job.jobid};",  # noqa: S608 - for a person to read
        )
    elif job.has_run and (
        job.succeeded_at is None or job.now - job.succeeded_at > MAX_SILENCE
    ):
        at = job.succeeded_at
        last = "has never succeeded" if at is None else f"last succeeded at {at:%F %R}"
        yield _found(
            Severity.ERROR,
            f"the job {name!r} {last}; its last failure: {job.failure}",
            f"SELECT * FROM cron.job_run_details WHERE jobid = {job.jobid}"  # noqa: S608 - for a person to read
            " ORDER BY start_time DESC LIMIT 5;",
        )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="cron", severity=severity, finding=finding, remedy=remedy)
