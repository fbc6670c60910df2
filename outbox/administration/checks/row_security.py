"""Row-level security: it hides rows from relays and consumers without an error."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load

_READERS = ("maintainer", "relay", "consumer", "monitor", "web")


def check_row_security(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find tables whose row-level security applies to a role that must see all rows."""
    for table, is_forced, roles in connection.execute(
        load("outbox", "list_row_security"),
        {"owner": here.owner, "roles": [here.role(name) for name in _READERS]},
    ):
        unforced = f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY; "
        yield Finding(
            check="row security",
            severity=Severity.ERROR,
            finding=f"row-level security of {table} applies to {', '.join(roles)}:"
            " as it would hide rows from them, they refuse to work",
            remedy=f"{unforced if is_forced else ''}ALTER TABLE {table} DISABLE ROW"
            f" LEVEL SECURITY;  -- or: ALTER ROLE {roles[0]} BYPASSRLS",
        )
