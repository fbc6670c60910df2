"""Roles: all of them exist, as the migrations create them."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, error
from outbox.administration.checks.by_statement import by_statement
from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load


def check_roles(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find roles that don't exist or can't do their work."""
    if here.owner != here.role("owner"):
        yield error(
            f"the tables belong to {here.owner}, not to {here.role('owner')}: REASSIGN"
            " OWNED or ALTER … OWNER gave them away, so that the upkeep and pillarbox"
            " migrate fail",
            f'REASSIGN OWNED BY "{here.owner}" TO "{here.role("owner")}";'
            "  -- if it owns nothing else in this database",
        )
    yield from by_statement(load("outbox", "check_roles"))(connection, here)
