"""Which other sessions a role sees."""

from outbox.administration.connection import AdministrationConnection
from outbox.postgres.sql_files import load


def sees_all_sessions(connection: AdministrationConnection) -> tuple[bool, str]:
    """Return whether this role sees what other sessions do, and its name in SQL."""
    ((sees_all, role),) = connection.execute(load("outbox", "sees_all_sessions"))
    return sees_all, role
