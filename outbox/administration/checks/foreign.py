"""Foreign objects: no role's code may run as the role that migrates or reads."""

from collections.abc import Iterator
from typing import Final

from pillarbox.outbox.administration.check import Finding, Installation, error, hint
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.names import Names
from pillarbox.outbox.postgres.sql_files import load
from pillarbox.outbox.postgres.superuser import LIST_LESSER_OWNERS

LIST_FOREIGN_OBJECTS: Final = load("outbox", "list_foreign_objects")
"""Why a migration refuses; with placeholders for `Names.fill`."""


def check_foreign(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find objects, triggers and rights because of which a migration refuses."""
    for finding, remedy, _ in _list(connection, here.names):
        yield error(finding, remedy)


def check_superuser(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find roles that could become superusers; say that none is needed."""
    for finding, remedy in connection.execute(LIST_LESSER_OWNERS):
        yield error(finding, remedy)
    if connection.info.parameter_status("is_superuser") == "on":
        monitor = here.role("monitor")
        yield hint(
            "connected as a superuser, which doctor and status don't need",
            f"connect as a member of {monitor} and pg_monitor",
        )


def may_be_read(connection: AdministrationConnection, names: Names) -> bool:
    """Return whether reading the schemas runs nobody else's code."""
    return not (
        connection.execute(LIST_LESSER_OWNERS).fetchall()
        or any(runs for *_, runs in _list(connection, names))
    )


def _list(
    connection: AdministrationConnection, names: Names
) -> list[tuple[str, str, bool]]:
    query = names.fill(LIST_FOREIGN_OBJECTS).encode()
    return connection.execute(query).fetchall()
