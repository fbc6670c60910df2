"""pg_cron, if it drives the upkeep: it runs, has pillarbox's jobs, and they succeed."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from shlex import quote
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

_UPKEEP: Final = ("pillarbox upkeep", "CALL outbox.maintain(")
_PLAN: Final = ("pillarbox plan detaches", "SELECT outbox.schedule_detaches(")


class _Job(NamedTuple):
    jobid: int
    active: bool
    succeeded_at: datetime | None
    has_run: bool
    now: datetime
    failure: str | None
    is_failing: bool


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
    cron = find_cron(connection)
    if cron.is_lost:
        here_quoted = sql.Literal(cron.here).as_string(connection)
        yield _found(
            Severity.ERROR,
            f"pg_cron runs in the database {cron.home}, which doesn't exist: no job of"
            " this server runs",
            f"ALTER SYSTEM SET cron.database_name = {here_quoted};  -- then restart the"
            f" server, and run: {here.migrate}",
        )
    if not cron.is_here:
        return
    yield from _judge_foreign(connection, cron.heeds_nodes, here)
    ran = read_upkeep(connection)
    upkeep = _look(connection, _UPKEEP, here.role("maintainer"))
    if ran.is_fresh and upkeep.drives_nothing:
        return
    with _acting_as(connection, None):
        counted = connection.execute(load("outbox", "count_orphan_jobs")).fetchone()
    (orphans,) = counted or (0,)
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
            f"the job {plan.name!r} has never run",
            "SELECT * FROM cron.job_run_details ORDER BY runid DESC LIMIT 5;"
            "  -- do other jobs run? If it is new, wait for the next hour",
        )


def _judge_foreign(
    connection: AdministrationConnection, heeds_nodes: bool, here: Installation
) -> Iterator[Finding]:
    """Find jobs that look like pillarbox's, but don't maintain this database."""
    roles = [here.role("maintainer"), here.role("detacher")]
    found = set()
    for role in (None, *roles):
        if role is not None and not _may_become(connection, role):
            continue
        if _may_use_cron(connection, role):
            with _acting_as(connection, role):
                found |= set(
                    connection.execute(
                        load("outbox", "list_foreign_jobs"),
                        {"roles": roles, "heeds_nodes": heeds_nodes},
                    )
                )
    for _, job, database, why, is_dead, is_replaced in sorted(found):
        yield _found(
            Severity.ERROR if is_dead else Severity.WARNING,
            f"{job}{why}",
            here.migrate
            if is_replaced
            else f"{here.migrate} --drop-jobs-of {quote(database)}"
            "  # unless you want the job",
        )


def _look(
    connection: AdministrationConnection, job: tuple[str, str], role: str
) -> _Sight:
    # A role sees only its own jobs.
    name, command = job
    if not _may_become(connection, role):
        return _Sight(name, role, may_look=False)
    if not _may_use_cron(connection, role):
        return _Sight(name, role, may_look=True)
    with _acting_as(connection, role):
        row = connection.execute(
            load("outbox", "read_job"), {"command": command}
        ).fetchone()
    return _Sight(name, role, True, True, None if row is None else _Job(*row))


def _may_become(connection: AdministrationConnection, role: str) -> bool:
    asked = {"role": role}
    row = connection.execute(load("outbox", "may_become"), asked).fetchone()
    return row == (True,)


def _may_use_cron(connection: AdministrationConnection, role: str | None) -> bool:
    asked = {"role": role}
    row = connection.execute(load("outbox", "may_use_cron"), asked).fetchone()
    return row == (True,)


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
    elif job.has_run:
        at = job.succeeded_at
        is_late = at is None or job.now - at > MAX_SILENCE
        if not is_late and not job.is_failing:
            return
        last = "has never succeeded" if at is None else f"last succeeded at {at:%F %R}"
        yield _found(
            Severity.ERROR if is_late else Severity.WARNING,
            f"the job {name!r} {last}; its last failure: {job.failure}",
            f"SELECT * FROM cron.job_run_details WHERE jobid = {job.jobid}"  # noqa: S608 - for a person to read
            " ORDER BY runid DESC LIMIT 5;",
        )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="cron", severity=severity, finding=finding, remedy=remedy)
