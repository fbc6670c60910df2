"""Check everything that the tables depend on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Final

from pillarbox.outbox.administration.check import Check, Finding, Installation, Severity
from pillarbox.outbox.administration.checks.backlog import check_backlog
from pillarbox.outbox.administration.checks.by_statement import by_statement
from pillarbox.outbox.administration.checks.cron import check_cron
from pillarbox.outbox.administration.checks.failures import check_failures
from pillarbox.outbox.administration.checks.foreign import (
    check_foreign,
    check_superuser,
    may_be_read,
)
from pillarbox.outbox.administration.checks.locks import check_locks
from pillarbox.outbox.administration.checks.pins import check_pins
from pillarbox.outbox.administration.checks.readers import check_readers, check_unrouted
from pillarbox.outbox.administration.checks.retention import check_retention
from pillarbox.outbox.administration.checks.upkeep import check_upkeep
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.names import Names
from pillarbox.outbox.errors import PoolerError, UpkeepError
from pillarbox.outbox.observability.measures.reading import PARTS, Scope, attempt
from pillarbox.outbox.observability.overview import Overview, read_overview
from pillarbox.outbox.postgres.pooler_check import refuse_pooler
from pillarbox.outbox.postgres.sql_files import load

CHECKS: Final[dict[str, Check]] = {
    "foreign": check_foreign,
    "superuser": check_superuser,
    "standby": by_statement(load("outbox", "check_standby")),
    "schema": by_statement(load("outbox", "check_schema")),
    "cluster": by_statement(load("outbox", "check_cluster")),
    "extensions": by_statement(load("outbox", "check_extensions")),
    "roles": by_statement(load("outbox", "check_roles")),
    "grants": by_statement(load("outbox", "check_grants")),
    "row security": by_statement(load("outbox", "check_row_security")),
    "upkeep": check_upkeep,
    "cron": check_cron,
    "partitions": by_statement(load("outbox", "check_partitions")),
    "retention": check_retention,
    "receipts": by_statement(load("outbox", "check_receipts")),
    "readers": check_readers,
    "unrouted": check_unrouted,
    "sessions": by_statement(load("outbox", "check_sessions")),
    "locks": check_locks,
}
OF_PROCESSES: Final = ("upkeep", "partitions", "retention")
"""The checks of the schema that a relay and a consumer may run for the metrics."""
QUICK: Final = (*OF_PROCESSES, "cluster", "receipts", "unrouted")
"""The checks of the schema that `pillarbox status` and the page run, too."""
_QUICKER: Final = CHECKS | {"unrouted": partial(check_unrouted, days=14)}
"""Faster variants for `QUICK`: opening all days takes long."""
OF_OVERVIEW: Final[dict[str, Callable[[Overview], Iterator[Finding]]]] = {
    "backlog": check_backlog,
    "failures": check_failures,
    "pins": check_pins,
}
_PATIENT: Final = Scope(
    parts=[part for part in PARTS if part not in {"rate", "upkeep"}],
    patience=timedelta(minutes=1),
)


def examine(
    connection: AdministrationConnection,
) -> Iterator[tuple[str, list[Finding]]]:
    """Run every check, and yield its name with its findings.

    Changes nothing. What this role isn't allowed to see is reported as a finding.

    Raises:
        UpkeepError: the database doesn't contain pillarbox's schema.
    """
    here = _find_installation(connection)
    if not may_be_read(connection, here.names):  # these read only the catalog
        for name in ("foreign", "superuser", "roles"):
            yield name, _run(name, connection, here)
        return
    for name in CHECKS:
        yield name, _run(name, connection, here)
    overview = read_overview(connection, _PATIENT)
    yield "measurement", list(overview.missing)
    for name, check in OF_OVERVIEW.items():
        yield name, _named(name, check(overview))


def examine_quickly(
    connection: AdministrationConnection,
) -> tuple[Overview, tuple[Finding, ...]]:
    """Measure the database, and run the checks that take little time.

    Returns the measurement and the findings, worst first; there is none if all is well.

    Raises:
        UpkeepError: the database doesn't contain pillarbox's schema.
    """
    overview = read_overview(connection)
    return overview, find_quickly(connection, overview)


def find_quickly(
    connection: AdministrationConnection,
    overview: Overview,
    checks: Iterable[str] = QUICK,
) -> tuple[Finding, ...]:
    """Return what is wrong in a measurement and in the schema, worst first.

    `pillarbox status`, the page and the metrics all show these findings.

    Args:
        checks: the checks of the schema to run.
    """
    found = [*overview.missing, *run_checks(connection, checks)]
    for name, check in OF_OVERVIEW.items():
        found += _named(name, check(overview))
    order = list(Severity)
    return tuple(sorted(found, key=lambda it: order.index(it.severity)))


def run_checks(
    connection: AdministrationConnection, names: Iterable[str]
) -> list[Finding]:
    """Run some of the quick checks, each for a limited time."""
    here = _find_installation(connection)
    patience = Scope().patience
    return [it for name in names for it in _run(name, connection, here, patience)]


def _find_installation(connection: AdministrationConnection) -> Installation:
    row = connection.execute(load("outbox", "find_names")).fetchone()
    if row is None:
        raise UpkeepError(
            "this database has no table outbox.message; run pillarbox migrate"
        )
    owner, role_prefix, partman, has_cron = row
    return Installation(
        owner=owner,
        names=Names(role_prefix=role_prefix, partman_schema=partman),
        has_cron=has_cron,
    )


def check_pooler(url: str) -> list[Finding]:
    """Find a pooler in transaction mode between this process and the database.

    The other checks must not run through one: their SETs would affect other clients.
    """
    try:
        refuse_pooler(url, any_role=True)
    except PoolerError as error:
        remedy = (
            "give commands, relays and consumers the URL of PostgreSQL itself or of a"
            " pool in session mode"
        )
        return [Finding(Severity.ERROR, str(error), remedy, "pooler")]
    return []


def _run(
    name: str,
    connection: AdministrationConnection,
    here: Installation,
    patience: timedelta | None = None,
) -> list[Finding]:
    def check() -> list[Finding]:
        checks = CHECKS if patience is None else _QUICKER
        return list(checks[name](connection, here))

    found = attempt(connection, name, check, patience)
    return _named(name, [found] if isinstance(found, Finding) else found)


def _named(name: str, findings: Iterable[Finding]) -> list[Finding]:
    return [replace(finding, check=name) for finding in findings]
