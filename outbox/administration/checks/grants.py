"""Grants: what the upkeep and the services stand on."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Names, Severity
from outbox.administration.checks.rights import list_lost_rights, list_open_routines
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load


def check_grants(
    connection: AdministrationConnection, names: Names
) -> Iterator[Finding]:
    """Find rights that were taken away, or given to all."""
    lost: dict[str, dict[str, str]] = {}
    for role, what, grant in list_lost_rights(connection, names):
        lost.setdefault(role, {})[grant] = what
    for role, grants in lost.items():
        yield _found(
            Severity.ERROR,
            f"{role} has lost rights on {', '.join(dict.fromkeys(grants.values()))}",
            " ".join(grants),
        )
    for routine, revoke in list_open_routines(connection):
        yield _found(Severity.WARNING, f"anybody may run {routine}", revoke)
    if names.partman is None:
        return
    granted = connection.execute(
        load("outbox", "check_rights_of_owner"),
        {"owner": names.owner, "partman": names.partman},
    ).fetchone()
    if granted != (True,):
        yield _found(
            Severity.ERROR,
            f"{names.owner} may not use pg_partman: no partition will be made",
            # Not ON ALL TABLES: in a schema that it shares are other people's.
            names.migrate,
        )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="grants", severity=severity, finding=finding, remedy=remedy)
