"""The upkeep: it succeeded recently, whatever drives it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from psycopg.rows import dict_row

from pillarbox.outbox.administration.check import Finding, Installation, Severity, error
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.postgres.sql_files import load

MAX_SILENCE: Final = timedelta(hours=3)


class CronHome(NamedTuple):
    """Where pg_cron runs its jobs.

    Attributes:
        is_here: whether they run in this database; the extension may exist without it.
        is_lost: whether their database is gone, as when this one was renamed.
        home: their database; None if the server doesn't load pg_cron.
        heeds_nodes: whether jobs connect to their node and port, instead of being run
            by background workers.
    """

    is_here: bool
    is_lost: bool
    home: str | None
    here: str
    heeds_nodes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """How the last upkeep of the partitions ended.

    Attributes:
        succeeded_at: when it last succeeded; None if never.
        age: the time since its last success, or since the tables were created.
        failure: what it couldn't do; None if it has succeeded since.
        clock_problem: why the server's clock isn't trusted; None if it is.
        next_at: when pg_cron starts it next, if that is known.
        late_at: when it becomes late, unless it succeeds before.
        is_late: whether it is late.
        is_new: whether the tables are new.
    """

    succeeded_at: datetime | None
    age: timedelta | None
    failed_at: datetime | None
    failure: str | None
    clock_problem: str | None
    next_at: datetime | None
    late_at: datetime | None
    is_late: bool
    is_new: bool

    @property
    def is_failing(self) -> bool:
        """Whether it has failed since its last success, or distrusts the clock."""
        return self.failure is not None or self.clock_problem is not None

    @property
    def is_fresh(self) -> bool:
        """Whether it succeeded recently."""
        return self.succeeded_at is not None and not self.is_late


def find_cron(connection: AdministrationConnection) -> CronHome:
    """Find out where pg_cron runs its jobs."""
    return CronHome(*connection.execute(load("outbox", "find_cron")).fetchall()[0])


def read_upkeep(connection: AdministrationConnection) -> Upkeep:
    """Return how the last upkeep ended."""
    with connection.cursor(row_factory=dict_row) as cursor:
        (row,) = cursor.execute(load("outbox", "read_upkeep")).fetchall()
    now, awaited_at = row.pop("now"), row.pop("awaited_at")
    last = row["succeeded_at"] or awaited_at
    return Upkeep(
        **row,
        age=None if last is None else now - last,
        next_at=_next_run(now) if find_cron(connection).is_here else None,
        late_at=None if last is None else last + MAX_SILENCE,
        is_late=not _is_recent(last, now),
        is_new=_is_recent(awaited_at, now),
    )


def _is_recent(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and abs(now - moment) <= MAX_SILENCE


def _next_run(now: datetime) -> datetime:
    # migrations/schedule.sql schedules the upkeep as 7 * * * *.
    at = now.replace(minute=7, second=0, microsecond=0)
    return at if at > now else at + timedelta(hours=1)


def check_upkeep(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find an upkeep that nothing drives, that fails, or that distrusts the clock."""
    upkeep = read_upkeep(connection)
    if upkeep.clock_problem is not None:
        yield error(
            f"{upkeep.clock_problem}. Nothing is dropped, and partitions are created"
            " for today and tomorrow only",
            "pillarbox maintain --accept-clock  # if SELECT now() is right; if not, set"
            " the server's clock first",
        )
        return
    for failed_at, failure, remedy in connection.execute(
        load("outbox", "list_upkeep_failures")
    ):
        yield Finding(
            Severity.WARNING if upkeep.is_fresh else Severity.ERROR,
            f"the upkeep failed at {failed_at:%F %R}: {failure}",
            remedy or "pillarbox maintain  # once the cause is fixed",
        )
    if upkeep.is_fresh:
        return
    if not upkeep.is_late and upkeep.next_at is not None:
        return  # not due yet; the check of pg_cron reports problems with the jobs
    if not upkeep.is_late:
        severity, finding = Severity.WARNING, "the upkeep has not run yet"
    elif upkeep.succeeded_at is None:
        severity, finding = Severity.ERROR, "the upkeep has never succeeded"
    else:
        last = f"{upkeep.succeeded_at:%F %R}"
        severity, finding = Severity.ERROR, f"the upkeep last succeeded at {last}"
    yield Finding(
        severity,
        f"{finding}: it creates future partitions and drops expired ones",
        "pillarbox maintain  # now, and every hour from any scheduler"
        + (f", or by pg_cron: {here.migrate}" if find_cron(connection).is_here else ""),
    )
