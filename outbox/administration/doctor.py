"""Check everything that the tables depend on."""

from collections.abc import Iterator
from typing import Final

import psycopg

from outbox.administration.check import Check, Finding, Installation, Severity
from outbox.administration.checks.backlog import check_backlog, check_pins
from outbox.administration.checks.broker import check_broker
from outbox.administration.checks.cron import check_cron
from outbox.administration.checks.extensions import check_extensions
from outbox.administration.checks.foreign import check_foreign, may_be_read
from outbox.administration.checks.grants import check_grants
from outbox.administration.checks.locks import check_locks
from outbox.administration.checks.partitions import check_partitions
from outbox.administration.checks.retention import check_retention
from outbox.administration.checks.roles import check_roles
from outbox.administration.checks.row_security import check_row_security
from outbox.administration.checks.schema import (
    check_schema,
    newest_version,
    read_version,
)
from outbox.administration.checks.upkeep import check_standby, check_upkeep
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import Names
from outbox.errors import PoolerError, UpkeepError
from outbox.postgres.pooler_check import refuse_pooler
from outbox.postgres.sql_files import load

APPLICATION_NAME: Final = "pillarbox doctor"

CHECKS: Final[dict[str, Check]] = {
    "foreign": check_foreign,
    "standby": check_standby,
    "schema": check_schema,
    "extensions": check_extensions,
    "roles": check_roles,
    "grants": check_grants,
    "row security": check_row_security,
    "upkeep": check_upkeep,
    "cron": check_cron,
    "partitions": check_partitions,
    "retention": check_retention,
    "backlog": check_backlog,
    "broker": check_broker,
    "pins": check_pins,
    "locks": check_locks,
}


def examine(
    connection: AdministrationConnection,
) -> Iterator[tuple[str, list[Finding]]]:
    """Run every check, and yield its name with its findings.

    Changes nothing. What this role isn't allowed to see is reported as a finding.

    Raises:
        UpkeepError: the database doesn't contain pillarbox's schema.
    """
    row = connection.execute(load("outbox", "find_names")).fetchone()
    if row is None:
        raise UpkeepError(
            "this database has no table outbox.message; run pillarbox migrate"
        )
    owner, role_prefix, partman, has_cron = row
    here = Installation(
        owner=owner,
        names=Names(
            role_prefix=role_prefix,
            partman_schema=partman or Names().partman_schema,
        ),
        has_partman=partman is not None,
        has_cron=has_cron,
    )
    checks = CHECKS
    if not may_be_read(connection, here.names):  # these two read only the catalog
        checks = {"foreign": check_foreign, "roles": check_roles}
    for name, check in checks.items():
        yield name, list(_run(name, check, connection, here))


def check_pooler(url: str) -> list[Finding]:
    """Find a pooler in transaction mode between this process and the database.

    The other checks must not run through one: their SETs would affect other clients.
    """
    try:
        refuse_pooler(url)
    except PoolerError as error:
        return [
            Finding(
                check="pooler",
                severity=Severity.ERROR,
                finding=str(error),
                remedy="give commands, relays and consumers the URL of PostgreSQL"
                " itself or of a pool in session mode",
            )
        ]
    return []


def _run(
    name: str, check: Check, connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    try:
        yield from check(connection, here)
    except psycopg.errors.InsufficientPrivilege as error:
        yield Finding(
            check=name,
            severity=Severity.UNKNOWN,
            finding=f"this role lacks privileges: {error.diag.message_primary}",
            remedy="run pillarbox doctor as a superuser or as a member of"
            f" {here.role('monitor')} and pg_monitor",
        )
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedFunction) as error:
        yield Finding(
            check=name,
            severity=Severity.ERROR,
            finding=f"part of the schema is missing: {error.diag.message_primary}",
            remedy=_remedy_for_missing(connection, here),
        )


def _remedy_for_missing(
    connection: AdministrationConnection, here: Installation
) -> str:
    if read_version(connection) != newest_version():
        return here.migrate
    return (
        "it was dropped: run its statement, which pillarbox migrate --sql prints, as"
        f" {here.owner}; then: {here.migrate}"
    )
