"""The upkeep of the partitions, run by a command instead of pg_cron."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Final

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.duration import exact_duration
from pillarbox.outbox.errors import UpkeepError
from pillarbox.outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from pillarbox.outbox.postgres.sql_files import load

APPLICATION_NAME: Final = "pillarbox maintain"
"""The application_name of the upkeep's sessions in `pg_stat_activity`."""

DETACH_WAIT: Final = timedelta(minutes=5)

_LOCK: Final = (LOCK_CLASS, int(Lock.UPKEEP))
_SEE: Final = "run pillarbox doctor for the remedies"
_DETACHED: Final = "detached"
_FAILED: Final = "not detached"
# Another upkeep has detached or dropped the partition, or is about to.
_OVERTAKEN: Final = (
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.UndefinedTable,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepStep:
    """One thing that the upkeep would do now.

    Attributes:
        step: make, detach, finalize, drop, keep, attach, hold, trim, or refuse because
            the clock can't be trusted.
        unsettled: rows that hold the partition, counted up to 1,000; None if they
            weren't counted or can't be.
        statement: the SQL of the step; for `hold` the query that shows the rows, and
            for `refuse` the call that confirms the clock.
    """

    step: str
    parent_table: str
    partition: str | None
    starts_at: datetime | None
    ends_at: datetime | None
    unsettled: int | None
    reason: str
    statement: str


def plan_upkeep(connection: AdministrationConnection) -> list[UpkeepStep]:
    """Return what the upkeep would do now, and why; changes nothing."""
    with connection.cursor(row_factory=class_row(UpkeepStep)) as cursor:
        return cursor.execute(load("outbox", "plan_upkeep")).fetchall()


def accept_clock(connection: AdministrationConnection) -> None:
    """Confirm that the server's clock is right, until the upkeep next succeeds.

    After a pause longer than `outbox.upkeep.longest_pause`, or if the last success lies
    in the future, the upkeep drops nothing until this is called.
    """
    connection.execute("SELECT outbox.accept_clock()")


def maintain(
    connection: AdministrationConnection,
    *,
    report: Callable[[str], None],
    detach_wait: timedelta = DETACH_WAIT,
) -> None:
    """Create missing partitions, detach expired ones, and drop detached ones.

    Args:
        connection: in autocommit mode.
        report: called with a line for each step.
        detach_wait: how long a detach may wait for transactions that use the table;
            the next run completes it.

    Raises:
        UpkeepError: another run is under way; something failed, which
            `outbox.upkeep_failure` also records; or a partition is to be detached, and
            this role can't SET ROLE to the tables' owner, which alone may do that.
    """
    lock = connection.execute("SELECT pg_try_advisory_lock(%s, %s)", _LOCK)
    if lock.fetchone() == (False,):
        raise UpkeepError(
            "another pillarbox maintain is running: wait until it has finished; if none"
            " is, pillarbox doctor names the session that holds its lock"
        )

    def on_notice(notice: psycopg.errors.Diagnostic) -> None:
        # The routines report on each partition; a notice with a hint is a warning.
        if notice.severity_nonlocalized == "NOTICE" and notice.message_hint is None:
            report(notice.message_primary or "")

    connection.add_notice_handler(on_notice)
    try:
        # It would end the whole CALL: each step has limits of its own.
        connection.execute("SET statement_timeout = 0")
        ((owner, may_detach, began_at),) = connection.execute(
            load("outbox", "find_owner")
        )
        problem = _run_routines(connection, began_at)
        if not may_detach and not problem and _to_detach(connection):
            problem = (
                "partitions are past their retention, but only a role that can SET"
                f" ROLE {owner} may detach them: run pillarbox maintain as such a"
                " role, too"
            )
        # The second time, the followers of tables whose partitions were dropped.
        for _ in range(2):
            if not may_detach or not _detach_expired(
                connection, owner, detach_wait, report
            ):
                break
            problem = _run_routines(connection, began_at)
    finally:
        connection.remove_notice_handler(on_notice)
        connection.execute("RESET statement_timeout")
        connection.execute("SELECT pg_advisory_unlock(%s, %s)", _LOCK)
    if problem:
        raise UpkeepError(problem)


def _run_routines(connection: AdministrationConnection, began_at: object) -> str | None:
    """Take all steps but concurrent detaches; return what failed since `began_at`."""
    try:
        connection.execute("CALL outbox.maintain(since => %s)", (began_at,))
    except psycopg.errors.RaiseException as error:
        return f"{error.diag.message_primary}; {_SEE}"
    return None


def _detach_expired(
    connection: AdministrationConnection,
    owner: str,
    wait: timedelta,
    report: Callable[[str], None],
) -> bool:
    """Detach partitions as planned; return whether there is more for the routines."""
    discard = load("outbox", "discard_detaches")
    blocked = set()
    has_more = False
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(owner)))
    try:
        # Those that a killed run recorded but never began.
        connection.execute(discard)
        for step in _to_detach(connection):
            if step.parent_table not in blocked:
                outcome = _detach(connection, step, wait)
                if outcome in {_DETACHED, _FAILED}:
                    has_more = True
                else:
                    blocked.add(step.parent_table)
                report(f"{step.partition}: {outcome}")
        connection.execute(discard)
    finally:
        connection.execute("RESET ROLE")
    return has_more


def _to_detach(connection: AdministrationConnection) -> list[UpkeepStep]:
    return [step for step in plan_upkeep(connection) if step.step == "detach"]


def _detach(
    connection: AdministrationConnection, step: UpkeepStep, wait: timedelta
) -> str:
    connection.execute(load("outbox", "record_detach"), asdict(step))
    milliseconds = round(wait.total_seconds() * 1000)
    try:
        connection.execute(f"SET statement_timeout = {milliseconds}".encode())
        connection.execute(step.statement.encode())
    except psycopg.errors.QueryCanceled:
        return (
            f"not detached yet: after {exact_duration(wait)} a transaction is still"
            f" using {step.parent_table}; the next run continues"
        )
    except _OVERTAKEN as error:
        return f"not detached: {error.diag.message_primary}; the next run continues"
    except psycopg.Error as error:
        if connection.broken:
            raise
        connection.execute(
            load("outbox", "record_failed_detach"),
            {
                **asdict(step),
                "failure": error.diag.message_primary,
                "state": error.sqlstate,
                "context": error.diag.context or "",
            },
        )
        return _FAILED
    finally:
        connection.execute("SET statement_timeout = 0")
    return _DETACHED
