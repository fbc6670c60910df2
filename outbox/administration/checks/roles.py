"""Roles: all of them exist, as the migrations create them."""

from collections.abc import Iterator
from typing import Final

from outbox.administration.check import Finding, Installation, error
from outbox.administration.checks.by_statement import by_statement
from outbox.administration.connection import AdministrationConnection
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
        yield error(
            f"the tables belong to {here.owner}, not to {here.role('owner')}: REASSIGN"
            " OWNED or ALTER … OWNER gave them away, so that the upkeep and pillarbox"
            " migrate fail",
            _GIVE_BACK.format(owner=here.owner, wanted=here.role("owner")),
        )
    yield from by_statement(load("outbox", "check_roles"))(connection, here)
