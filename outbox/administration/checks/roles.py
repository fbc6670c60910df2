"""Roles: all of them exist, as the migrations create them."""

from collections.abc import Iterator
from typing import Final

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import ROLES
from outbox.postgres.sql_files import load

# Everything of ours, but nothing else that the other role owns.
_GIVE_BACK: Final = (
    "DO $$ DECLARE it text; BEGIN FOR it IN"
    " SELECT format('SCHEMA %I', n.nspname) FROM pg_namespace n"
    " WHERE n.nspname IN ('outbox', 'inbox') AND n.nspowner = '\"{owner}\"'::regrole"
    " UNION ALL SELECT format('TABLE %I.%I', n.nspname, c.relname)"
    " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname IN ('outbox', 'inbox') AND c.relowner = '\"{owner}\"'::regrole"
    " AND c.relkind IN ('r', 'p', 'v', 'S') AND NOT EXISTS (SELECT FROM pg_depend d"
    " WHERE d.objid = c.oid AND d.classid = 'pg_class'::regclass"
    " AND d.refclassid = 'pg_class'::regclass AND c.relkind = 'S'"
    " AND d.deptype IN ('a', 'i'))"
    " UNION ALL SELECT format('ROUTINE %s', p.oid::regprocedure)"
    " FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
    " WHERE n.nspname IN ('outbox', 'inbox') AND p.proowner = '\"{owner}\"'::regrole"
    " LOOP EXECUTE format('ALTER %s OWNER TO %I', it, '{wanted}'); END LOOP; END $$;"
)


def check_roles(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find roles that don't exist or can't do their work."""
    if here.owner != here.role("owner"):
        yield _found(
            Severity.ERROR,
            f"the tables belong to {here.owner}, not to {here.role('owner')}: REASSIGN"
            " OWNED or ALTER … OWNER gave them away, so that the upkeep and pillarbox"
            " migrate fail",
            _GIVE_BACK.format(owner=here.owner, wanted=here.role("owner")),
        )
    for (role,) in connection.execute(
        load("outbox", "list_missing_roles"),
        {"roles": [here.role(name) for name in ROLES]},
    ):
        yield _found(Severity.ERROR, f"the role {role} doesn't exist", here.migrate)
    detacher = here.role("detacher")
    for role, may_not_login, may_login, is_no_member in connection.execute(
        load("outbox", "judge_roles"),
        {
            "owner": here.role("owner"),
            "maintainer": here.role("maintainer"),
            "detacher": detacher,
        },
    ):
        if may_not_login:
            yield _found(
                Severity.ERROR,
                f"{role} may not log in, but pg_cron only runs jobs of roles that may",
                f'ALTER ROLE "{role}" LOGIN;',
            )
        if may_login:
            yield _found(
                Severity.WARNING,
                f"{role} may log in, and could then change and drop everything",
                f'ALTER ROLE "{role}" NOLOGIN;',
            )
        if is_no_member:
            yield _found(
                Severity.ERROR,
                f"{detacher} lacks the privileges of {here.role('owner')}: it can't"
                " detach partitions",
                f'GRANT "{here.role("owner")}" TO "{detacher}";',
            )


def _found(severity: Severity, finding: str, remedy: str) -> Finding:
    return Finding(check="roles", severity=severity, finding=finding, remedy=remedy)
