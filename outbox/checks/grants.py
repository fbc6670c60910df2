"""Roles and rights: those that the upkeep stands on."""

from collections.abc import Iterator
from typing import Final

from outbox.administration import AdministrationConnection
from outbox.check import Finding, Names, Severity

_ROLES: Final = (
    "owner",
    "maintainer",
    "detacher",
    "application",
    "relay",
    "consumer",
    "monitor",
)
_MISSING: Final = """
SELECT wanted FROM unnest(%(roles)s::text[]) AS wanted
 WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = wanted)
"""
_RIGHTS_OF_OWNER: Final = """
SELECT has_schema_privilege(%(owner)s, n.oid, 'USAGE')
   AND (SELECT bool_and(has_table_privilege(%(owner)s, c.oid, privilege))
          FROM pg_class c,
               unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS privilege
         WHERE c.relnamespace = n.oid
           AND c.relname IN ('part_config', 'part_config_sub'))
   AND (SELECT bool_and(has_function_privilege(%(owner)s, p.oid, 'EXECUTE'))
          FROM pg_proc p WHERE p.pronamespace = n.oid)
  FROM pg_namespace n WHERE n.nspname = %(partman)s
"""


def check_grants(
    connection: AdministrationConnection, names: Names
) -> Iterator[Finding]:
    """Find roles that are gone, and rights that an extension's upgrade dropped."""
    roles = [names.role(name) for name in _ROLES]
    for (role,) in connection.execute(_MISSING, {"roles": roles}).fetchall():
        yield Finding(
            check="grants",
            severity=Severity.ERROR,
            finding=f"the role {role} is gone",
            remedy=f'CREATE ROLE "{role}"; then: outbox migrate',
        )
    if names.partman is None:
        return
    granted = connection.execute(
        _RIGHTS_OF_OWNER, {"owner": names.owner, "partman": names.partman}
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
