"""Grants: the rights of each role, as the migrations grant them."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.migrations.grants import Right, closed_routines, rights
from outbox.postgres.sql_files import load


def check_grants(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find privileges that were revoked, or granted to PUBLIC."""
    lost: dict[str, list[Right]] = {}
    for right in _list_lost_rights(connection, here):
        lost.setdefault(here.role(right.role), []).append(right)
    fill = here.names.fill
    for role, its_rights in lost.items():
        objects = dict.fromkeys(fill(right.name) for right in its_rights)
        grants = dict.fromkeys(fill(right.grant) for right in its_rights)
        yield _found(
            Severity.ERROR,
            f"{role} lacks privileges on {', '.join(objects)}",
            " ".join(grants),
        )
    closed = closed_routines()
    for (routine,) in connection.execute(
        load("outbox", "list_open_routines"), {"routines": list(closed)}
    ):
        yield _found(
            Severity.WARNING,
            f"any role may run {routine}",
            f"REVOKE ALL ON {closed[routine]} {routine} FROM PUBLIC;",
        )
    if here.partman is None:
        return
    granted = connection.execute(
        load("outbox", "check_rights_of_owner"),
        {"owner": here.owner, "partman": here.partman},
    ).fetchone()
    if granted != (True,):
        yield _found(
            Severity.ERROR,
            f"{here.owner} lacks privileges on pg_partman: no new partitions will be"
            " created",
            # Not ON ALL TABLES: a shared schema has other applications' tables, too.
            here.migrate,
        )


def _list_lost_rights(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Right]:
    asked = [
        (right, column) for right in rights() for column in (right.columns or (None,))
    ]
    fill = here.names.fill
    lost = connection.execute(
        load("outbox", "list_lost_rights"),
        {
            "roles": [here.role(right.role) for right, _ in asked],
            "kinds": [right.kind for right, _ in asked],
            "objects": [fill(right.name) for right, _ in asked],
            "privileges": [right.privilege for right, _ in asked],
            "columns": [column for _, column in asked],
        },
    )
    return (asked[number - 1][0] for (number,) in lost)


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="grants", severity=severity, finding=finding, remedy=remedy)
