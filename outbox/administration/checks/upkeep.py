"""The upkeep: it succeeded lately, whatever drives it."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load

MAX_SILENCE: Final = timedelta(hours=3)
_EVERYWHERE: Final = "by any scheduler: cron, a systemd timer, a CronJob"


class CronHome(NamedTuple):
    """Where pg_cron works.

    Attributes:
        installed: whether it is in this database.
        home: the database of its jobs; None if the server does not load it.
    """

    installed: bool
    home: str | None
    here: str

    @property
    def is_here(self) -> bool:
        """Tell whether its jobs run here; the extension can stay without them."""
        return self.installed and self.home == self.here


class Upkeep(NamedTuple):
    """How the last upkeep ended; the times are the server's.

    Attributes:
        failure: what it could not do; None if it has succeeded since.
        clock_problem: why nothing is dropped by this clock; None if it is plausible.
        was_elsewhere: whether it was on another server or in another database, of which
            this is a copy, or before this server took over.
    """

    succeeded_at: datetime | None
    awaited_at: datetime | None
    now: datetime
    failed_at: datetime | None
    failure: str | None
    clock_problem: str | None
    was_elsewhere: bool

    @property
    def is_fresh(self) -> bool:
        """Tell whether it succeeded lately, and here."""
        return not self.was_elsewhere and _is_fresh(self.succeeded_at, self.now)

    @property
    def is_copied(self) -> bool:
        """Tell whether a late success is one of elsewhere, and says nothing of here."""
        return self.was_elsewhere and _is_fresh(self.succeeded_at, self.now)

    @property
    def is_new(self) -> bool:
        """Tell whether the tables were made lately."""
        return _is_fresh(self.awaited_at, self.now)

    @property
    def is_awaited(self) -> bool:
        """Tell whether it never ran, and is not late yet."""
        return self.succeeded_at is None and self.is_new


def find_cron(connection: AdministrationConnection) -> CronHome:
    """Look where pg_cron works."""
    return CronHome(*connection.execute(load("outbox", "find_cron")).fetchall()[0])


def read_upkeep(connection: AdministrationConnection) -> Upkeep:
    """Read when the upkeep last succeeded."""
    return Upkeep(*connection.execute(load("outbox", "read_upkeep")).fetchall()[0])


def is_standby(connection: AdministrationConnection) -> bool:
    """Tell whether this server replays what another one does."""
    return connection.execute(load("outbox", "is_standby")).fetchone() == (True,)


def check_standby(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Say what can't be seen on a standby, and where a remedy has to be run."""
    if is_standby(connection):
        yield Finding(
            check="standby",
            severity=Severity.UNKNOWN,
            finding="this server is a standby: pg_cron's launcher, the sessions, locks"
            " and replication slots of its primary can't be seen here",
            remedy="run pillarbox doctor on the primary as well, and every remedy"
            " there: a standby takes no changes",
        )


def check_upkeep(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find an upkeep that nobody drives, that fails, or that refuses its clock."""
    upkeep = read_upkeep(connection)
    if upkeep.clock_problem is not None:
        yield Finding(
            check="upkeep",
            severity=Severity.ERROR,
            finding=f"{upkeep.clock_problem}. Nothing is dropped, and partitions are"
            " made for today and tomorrow only",
            remedy="pillarbox maintain --accept-clock  # if SELECT now() tells the"
            " right time; if not, set the server's clock first",
        )
        return
    if upkeep.failure is not None:
        yield Finding(
            check="upkeep",
            severity=Severity.WARNING if upkeep.is_fresh else Severity.ERROR,
            finding=f"the upkeep failed at {upkeep.failed_at:%F %R}: {upkeep.failure}",
            remedy="pillarbox maintain  # once its cause is removed",
        )
    if upkeep.is_fresh:
        return
    if (upkeep.is_awaited or upkeep.is_copied) and find_cron(connection).is_here:
        return  # not yet due: what is wrong with the jobs, the check of pg_cron says
    if upkeep.is_copied:
        severity = Severity.WARNING
        finding = (
            f"the upkeep last succeeded at {upkeep.succeeded_at:%F %R}, elsewhere: this"
            " database was restored from there, or its server took over since. Nothing"
            " is known to drive the upkeep here"
        )
    elif upkeep.is_awaited:
        severity, finding = Severity.WARNING, "the upkeep has not run yet"
    elif upkeep.succeeded_at is None:
        severity, finding = Severity.ERROR, "the upkeep never succeeded"
    else:
        last = f"{upkeep.succeeded_at:%F %R}"
        severity, finding = Severity.ERROR, f"the upkeep last succeeded at {last}"
    yield Finding(
        check="upkeep",
        severity=severity,
        finding=f"{finding}: partitions are made ahead by it, and go by it",
        remedy=f"pillarbox maintain  # now, and hourly {_by_what(connection, here)}",
    )


def _by_what(connection: AdministrationConnection, here: Installation) -> str:
    cron = find_cron(connection)
    if cron.is_here:
        return f"by pg_cron, which works here: {here.migrate}; or {_EVERYWHERE}"
    if cron.home not in {None, cron.here}:
        return (
            f"{_EVERYWHERE}; or by pg_cron, which works in the database {cron.home}:"
            " SELECT cron.schedule_in_database('pillarbox upkeep', '7 * * * *', 'CALL"
            f" outbox.maintain()', '{cron.here}', '{here.role('maintainer')}')"
        )
    return _EVERYWHERE


def _is_fresh(moment: datetime | None, now: datetime) -> bool:
    return moment is not None and abs(now - moment) <= MAX_SILENCE
