"""pg_cron: loaded, alive, with our jobs, and these succeed."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from psycopg import sql

from outbox.administration import AdministrationConnection
from outbox.check import Finding, Names, Severity
from outbox.statement import load

_JOBS: Final = {"pillarbox upkeep": "maintainer", "pillarbox plan detaches": "detacher"}
_MAX_SILENCE: Final = timedelta(hours=3)


def check_cron(connection: AdministrationConnection, names: Names) -> Iterator[Finding]:
    """Find an upkeep that does not run, or fails."""
    row = connection.execute(load("outbox", "find_cron")).fetchone()
    installed, home, here = row or (False, None, None)
    if not installed or home != here:
        # The setting stays in a file when the library is no longer loaded.
        elsewhere = home is not None and home != here
        where = f"works in the database {home}" if elsewhere else "is not installed"
        yield _found(
            Severity.WARNING,
            f"pg_cron {where}, so nothing here runs the upkeep",
            "from another scheduler, every hour: outbox maintain",
        )
        return
    (orphans,) = connection.execute(load("outbox", "count_orphan_jobs")).fetchone() or (
        0,
    )
    launchers = connection.execute(load("outbox", "count_launchers")).fetchone()
    if orphans or launchers == (0,):
        why = f": {orphans} jobs are of roles that are gone" if orphans else ""
        yield _found(
            Severity.ERROR,
            f"the pg_cron launcher does not run, nor any job of this server{why}",
            "DELETE FROM cron.job WHERE username NOT IN (SELECT rolname FROM pg_roles);"
            "  -- if it does not run then, restart the server, and see its log",
        )
    for job, role in _JOBS.items():
        yield from _check_job(connection, job, names.role(role), names.migrate)


def _check_job(
    connection: AdministrationConnection, job: str, role: str, migrate: str
) -> Iterator[Finding]:
    # A role sees its own jobs only.
    if connection.execute(load("outbox", "may_become"), {"role": role}).fetchone() != (
        True,
    ):
        yield _found(
            Severity.UNKNOWN,
            f"only {role} sees whether the job {job!r} runs",
            f"run outbox doctor as a superuser or as a member of {role}",
        )
        return
    if connection.execute(
        load("outbox", "may_use_cron"), {"role": role}
    ).fetchone() != (True,):
        yield _found(
            Severity.ERROR,
            f"{role} may not use pg_cron: its jobs can't be seen or changed",
            f'GRANT USAGE ON SCHEMA cron TO "{role}";',
        )
        return
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
    try:
        row = connection.execute(load("outbox", "read_job"), {"job": job}).fetchone()
    finally:
        connection.execute("RESET ROLE")
    if row is None:
        yield _found(Severity.ERROR, f"the job {job!r} is gone", migrate)
        return
    jobid, active, succeeded_at, has_run, now, failure = row
    if not active:
        yield _found(
            Severity.ERROR,
            f"the job {job!r} is switched off",
            f"UPDATE cron.job SET active = true WHERE jobid = {jobid};",  # noqa: S608 - for a person to read
        )
    elif not has_run:
        yield _found(
            Severity.WARNING,
            f"the job {job!r} has not run yet",
            "wait for the next hour, and ask again",
        )
    elif succeeded_at is None or now - succeeded_at > _MAX_SILENCE:
        last = "never" if succeeded_at is None else f"last at {succeeded_at:%F %R}"
        yield _found(
            Severity.ERROR,
            f"the job {job!r} succeeded {last}; its last failure: {failure}",
            f"SELECT * FROM cron.job_run_details WHERE jobid = {jobid}"  # noqa: S608 - for a person to read
            " ORDER BY start_time DESC LIMIT 5;",
        )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="cron", severity=severity, finding=finding, remedy=remedy)
