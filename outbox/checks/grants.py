"""Roles and rights: those that the upkeep stands on."""

from collections.abc import Iterator
from typing import Final

from outbox.administration import AdministrationConnection
from outbox.check import Finding, Names, Severity
from outbox.statement import load

_ROLES: Final = (
    "owner",
    "maintainer",
    "detacher",
    "application",
    "relay",
    "consumer",
    "monitor",
)


def check_grants(
    connection: AdministrationConnection, names: Names
) -> Iterator[Finding]:
    """Find roles that are gone, and rights that an extension's upgrade dropped."""
    roles = [names.role(name) for name in _ROLES]
    for (role,) in connection.execute(
        load("outbox", "list_missing_roles"), {"roles": roles}
    ).fetchall():
        yield Finding(
            check="grants",
            severity=Severity.ERROR,
            finding=f"the role {role} is gone",
            remedy=f'CREATE ROLE "{role}"; then: outbox migrate',
        )
    if names.partman is None:
        return
    granted = connection.execute(
        load("outbox", "check_rights_of_owner"),
        {"owner": names.owner, "partman": names.partman},
    ).fetchone()
    if granted != (True,):
        schema, owner = f'"{names.partman}"', f'"{names.owner}"'
        yield Finding(
            check="grants",
            severity=Severity.ERROR,
            finding=f"{names.owner} may not use pg_partman: no partition will be made",
            remedy=f"GRANT USAGE ON SCHEMA {schema} TO {owner};"
            " GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA"
            f" {schema} TO {owner};"
            f" GRANT EXECUTE ON ALL ROUTINES IN SCHEMA {schema} TO {owner};",
        )
