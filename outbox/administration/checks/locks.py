"""Advisory locks: any role that may connect can take ours and block our processes."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.administration.names import ROLES
from outbox.postgres.advisory_lock import LOCK_CLASS, Lock, consumer_class
from outbox.postgres.lease import LockHolder
from outbox.postgres.sql_files import load


def check_locks(
    connection: AdministrationConnection, here: Installation
) -> Iterator[Finding]:
    """Find foreign sessions that hold our locks, and a database open to every role."""
    roles = [here.role(name) for name in ROLES]
    consumers = connection.execute(load("outbox", "list_consumers"))
    classes = [LOCK_CLASS, *(consumer_class(consumer) for (consumer,) in consumers)]
    for pid, role, application, client, locks in connection.execute(
        load("outbox", "list_foreign_locks"),
        {
            "classes": classes,
            "member": int(Lock.MEMBER),
            # The application rings doorbells, and holds no lock exclusively.
            "roles": [r for r in roles if r != here.role("application")],
        },
    ):
        yield Finding(
            check="locks",
            severity=Severity.ERROR,
            finding=f"{LockHolder(pid, role, application, client)} is not one of"
            f" our processes, but holds {locks} of our advisory locks: relays,"
            " consumers or the upkeep are waiting for it",
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
