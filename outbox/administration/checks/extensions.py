"""pg_partman: installed, recent enough, and completely upgraded."""

from collections.abc import Iterator
from typing import Final

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load

_OLDEST: Final = (4, 7)


def check_extensions(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find a pg_partman that is missing, too old, or older than its package."""
    row = connection.execute(load("outbox", "read_partman_version")).fetchone()
    if row is None:
        yield Finding(
            check="extensions",
            severity=Severity.ERROR,
            finding="pg_partman is not installed: no partitions will be created",
            remedy=here.migrate,
        )
        return
    installed, available = row
    if tuple(int(part) for part in installed.split(".")[:2]) < _OLDEST:
        yield Finding(
            check="extensions",
            severity=Severity.ERROR,
            finding=f"pg_partman {installed} is older than 4.7",
            remedy=f"ALTER EXTENSION pg_partman UPDATE;  -- then: {here.migrate}",
        )
    elif installed != available:
        yield Finding(
            check="extensions",
            severity=Severity.WARNING,
            finding=f"pg_partman {installed} is installed, but the server's package is"
            f" {available}",
            remedy=f"ALTER EXTENSION pg_partman UPDATE;  -- then: {here.migrate},"
            " because the update from 4 to 5 drops privileges",
        )
