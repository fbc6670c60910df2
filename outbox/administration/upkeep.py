"""The upkeep of the partitions by a command of ours instead of pg_cron."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Final

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from outbox.administration.connection import AdministrationConnection
from outbox.errors import UpkeepError
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock
from outbox.postgres.sql_files import load

APPLICATION_NAME: Final = "pillarbox maintain"
"""By this name the sessions of the upkeep are found in `pg_stat_activity`."""

DETACH_WAIT: Final = timedelta(minutes=5)

_LOCK: Final = (LOCK_CLASS, int(Lock.UPKEEP))
# What can't be detached concurrently for this long is by lock_timeout and retry.
_PATIENCE: Final = timedelta(hours=6)
_SEE: Final = "run pillarbox doctor to see what is wrong"
_DONE: Final = {"finalize": "finalized", "detach": "detached"}
# Another upkeep has detached or dropped it, or is about to.
_OVERTAKEN: Final = (
    psycopg.errors.ObjectNotInPrerequisiteState,
    psycopg.errors.UndefinedTable,
    psycopg.errors.LockNotAvailable,
    psycopg.errors.DeadlockDetected,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing that the upkeep would do now.

    Attributes:
        step: make, detach, finalize, drop, keep, attach, hold, trim, or refuse: the
            clock can't be trusted to say that it may go.
        unsettled: rows that hold the partition, counted up to 1,000; None where it
            was not asked, or can't be told.
        statement: what does it; for `hold` the query that shows the rows, and for
            `refuse` what vouches for the clock.
    """

    step: str
    parent_table: str
    partition: str | None
    starts_at: datetime | None
    ends_at: datetime | None
    unsettled: int | None
    reason: str
    statement: str


def plan_upkeep(connection: AdministrationConnection) -> list[Step]:
    """Ask what the upkeep would do now, and why; changes nothing."""
    with connection.cursor(row_factory=class_row(Step)) as cursor:
        return cursor.execute(load("outbox", "plan_upkeep")).fetchall()


def accept_clock(connection: AdministrationConnection) -> None:
    """Vouch for the server's clock until the next success of the upkeep.

    After a pause longer than `outbox.upkeep.longest_pause`, or a last success that lies
    ahead of the clock, the upkeep drops nothing before this was called.
    """
    connection.execute("SELECT outbox.accept_clock()")


def maintain(
    connection: AdministrationConnection,
    *,
    tell: Callable[[str], None],
    detach_wait: timedelta = DETACH_WAIT,
) -> None:
    """Make what is missing, detach what has expired, drop what is detached.

    A member of the tables' owner detaches concurrently, which stalls no writer.
    For anyone else the routines detach under a short lock, by `lock_timeout` and retry.

    Args:
        connection: in autocommit mode.
        tell: is given a line for each thing done.
        detach_wait: how long a detach may wait for the transactions that use the
            table, or the end of an interrupted one for those that are older; the next
            run ends what this one left.

    Raises:
        UpkeepError: another run is at work, or not everything could be done; then
            `outbox.upkeep` has the reason, too.
    """
    if not _scalar(connection, "SELECT pg_try_advisory_lock(%s, %s)", _LOCK):
        raise UpkeepError("another pillarbox maintain is at work: let it finish")
    try:
        owner = _scalar(connection, load("outbox", "find_owner"))
        _finish(connection, tell)
        problem = _run_routines(connection, _PATIENCE if owner else timedelta(0))
        if owner:
            _detach_expired(connection, str(owner), detach_wait, tell)
        left = "; ".join(_finish(connection, tell))
        if left and not problem:
            problem = f"upkeep: {left}; {_SEE}"
            connection.execute("SELECT outbox.note_failure(%s)", (left,))
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s, %s)", _LOCK)
    if problem:
        raise UpkeepError(problem)


def _run_routines(
    connection: AdministrationConnection, patience: timedelta
) -> str | None:
    """Premake and the fallback; what failed must not keep the rest from its turn."""
    try:
        connection.execute("CALL outbox.maintain(patience => %s)", (patience,))
    except psycopg.errors.RaiseException as error:
        return f"{(error.diag.message_primary or '').rstrip('; ')}; {_SEE}"
    return None


def _detach_expired(
    connection: AdministrationConnection,
    owner: str,
    wait: timedelta,
    tell: Callable[[str], None],
) -> None:
    # What a run that was killed had noted and not begun.
    _forget_detaches(connection, owner)
    blocked = set()
    for step in plan_upkeep(connection):
        if step.step not in _DONE or step.parent_table in blocked:
            continue
        outcome = _detach(connection, owner, step, wait)
        if outcome != _DONE[step.step]:
            blocked.add(step.parent_table)
        tell(f"{step.partition}: {outcome}")
    _forget_detaches(connection, owner)


def _forget_detaches(connection: AdministrationConnection, owner: str) -> None:
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(owner)))
    try:
        connection.execute(load("outbox", "forget_detaches"))
    finally:
        connection.execute("RESET ROLE")


def _detach(
    connection: AdministrationConnection, owner: str, step: Step, wait: timedelta
) -> str:
    if step.step == "finalize" and not _scalar(
        connection, "SELECT outbox.may_finalize(to_regclass(%s))", (step.partition,)
    ):
        return (
            "not detached yet, its detach is under way, or a transaction is open that"
            " is older than it; the next run goes on"
        )
    connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(owner)))
    try:
        milliseconds = str(round(wait.total_seconds() * 1000))
        connection.execute(
            "SELECT set_config('statement_timeout', %s, false)", (milliseconds,)
        )
        if step.step == "detach":
            connection.execute(load("outbox", "note_detach"), asdict(step))
        connection.execute(step.statement.encode())
    except psycopg.errors.QueryCanceled:
        still = (
            "an older statement or transaction still runs"
            if step.step == "finalize"
            else f"a transaction still uses {step.parent_table}"
        )
        return f"not detached yet, after {wait} {still}; the next run goes on"
    except _OVERTAKEN as error:
        return f"not detached: {error.diag.message_primary}; the next run goes on"
    finally:
        connection.execute("RESET statement_timeout")
        connection.execute("RESET ROLE")
    return _DONE[step.step]


def _finish(
    connection: AdministrationConnection, tell: Callable[[str], None]
) -> list[str]:
    """End what was detached; give what is to be reported."""
    problems = []
    for partition, outcome, problem in connection.execute(
        load("outbox", "finish_detached")
    ):
        if partition is not None:
            tell(f"{partition}: {outcome}")
        if problem is not None:
            problems.append(str(problem))
    return problems


def _scalar(
    connection: AdministrationConnection,
    query: str,
    parameters: tuple[object, ...] = (),
) -> object:
    row = connection.execute(query.encode(), parameters or None).fetchone()
    return row[0] if row else None
