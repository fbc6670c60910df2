"""Advisory locks: any role that can connect can take them and block pillarbox."""

from collections.abc import Iterator

from pillarbox.outbox.administration.check import Finding, Installation, error
from pillarbox.outbox.administration.checks.by_statement import by_statement
from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.administration.names import ROLES
from pillarbox.outbox.postgres.advisory_lock import (
    CANCELS,
    LOCK_CLASS,
    Lock,
    LockHolder,
    reader_class,
)
from pillarbox.outbox.postgres.sql_files import load


def check_locks(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find other clients that hold pillarbox's locks, and a database open to PUBLIC."""
    roles = [here.role(name) for name in ROLES]
    readers = load("outbox", "list_reader_names")
    sessions = connection.execute(
        load("outbox", "list_foreign_locks"),
        {
            "class": LOCK_CLASS,
            "classes": [
                LOCK_CLASS,
                *(reader_class(name) for (name,) in connection.execute(readers)),
            ],
            "bells": [int(Lock.OUTBOX_DOORBELL), *CANCELS],
            # The application takes these only in shared mode, as any writer does.
            "roles": [role for role in roles if role != here.role("application")],
        },
    )
    for pid, role, application, client, locks in sessions:
        yield error(
            f"{LockHolder(pid, role, application, client)} holds {locks} of"
            " pillarbox's advisory locks, but isn't one of its processes: it blocks"
            " relays, consumers or the upkeep, or makes every insert send a NOTIFY",
            f"SELECT pg_terminate_backend({pid});  -- and keep its role out",
        )
    yield from by_statement(load("outbox", "check_public_connect"))(connection, here)
