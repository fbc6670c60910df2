"""Advisory locks: any role that can connect can take them and block pillarbox."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import ROLES
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock, LockHolder, consumer_class
from outbox.postgres.sql_files import load


def check_locks(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find other clients that hold pillarbox's locks, and a database open to PUBLIC."""
    roles = [here.role(name) for name in ROLES]
    consumers = connection.execute(load("outbox", "list_locking_consumers"))
    sessions = connection.execute(
        load("outbox", "list_foreign_locks"),
        {
            "class": LOCK_CLASS,
            "classes": [LOCK_CLASS, *(consumer_class(name) for (name,) in consumers)],
            "bells": [int(Lock.OUTBOX_DOORBELL), int(Lock.INBOX_DOORBELL)],
            # The application takes doorbells only in shared mode, as any writer does.
            "roles": [role for role in roles if role != here.role("application")],
        },
    )
    for pid, role, application, client, locks in sessions:
        yield Finding(
            check="locks",
            severity=Severity.ERROR,
            finding=f"{LockHolder(pid, role, application, client)} is not one of our"
            f" processes, but holds {locks} of our advisory locks: relays, consumers or"
            " the upkeep are waiting for it, or every insert sends a NOTIFY",
            remedy=f"SELECT pg_terminate_backend({pid});  -- and keep {role} out",
        )
    for database, is_open in connection.execute(load("outbox", "judge_connect")):
        if is_open:
            granted = ", ".join(f'"{role}"' for role in roles)
            yield Finding(
                check="locks",
                severity=Severity.HINT,
                finding="every role may connect to this database, and so may take the"
                " advisory locks that relays and the upkeep need",
                remedy=f"REVOKE CONNECT ON DATABASE {database} FROM PUBLIC;"
                f" GRANT CONNECT ON DATABASE {database} TO {granted};",
            )


def read_consumers(connection: AdministrationConnection) -> list[str]:
    """Return the consumers of the postgres broker, by name."""
    return [name for (name,) in connection.execute(load("outbox", "list_consumers"))]
