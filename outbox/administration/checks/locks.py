"""Advisory locks: any role that can connect can take them and block pillarbox."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

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
    # The application takes doorbells only in shared mode, as any writer does.
    trusted = [role for role in roles if role != here.role("application")]
    for each in _list_foreign(connection, trusted):
        for severity, consequence in _consequences(each):
            yield Finding(
                check="locks",
                severity=severity,
                finding=f"{each.holder} is not one of our processes, but {consequence}",
                remedy=f"SELECT pg_terminate_backend({each.pid});"
                f"  -- and keep {each.role} out",
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


class _Foreign(NamedTuple):
    """A row of `list_foreign_locks.sql`."""

    pid: int
    role: str
    application: str
    client: str | None
    locks: int
    rings: bool
    muffles: bool

    @property
    def holder(self) -> LockHolder:
        return LockHolder(self.pid, self.role, self.application, self.client)


def _list_foreign(
    connection: AdministrationConnection, trusted: Sequence[str]
) -> list[_Foreign]:
    seen = _look(connection, trusted)
    if any(each.muffles for each in seen):
        # A writer whose transaction is ending can hold the doorbell slightly longer
        # than the table's lock, so only sessions that both queries find count.
        connection.execute("SELECT pg_catalog.pg_sleep(0.2)")
        muffling = {each.pid for each in _look(connection, trusted) if each.muffles}
        seen = [each._replace(muffles=each.pid in muffling) for each in seen]
    return seen


def read_consumers(connection: AdministrationConnection) -> list[str]:
    """Return the consumers of the postgres broker, by name."""
    return [name for (name,) in connection.execute(load("outbox", "list_consumers"))]


def _look(
    connection: AdministrationConnection, trusted: Sequence[str]
) -> list[_Foreign]:
    consumers = connection.execute(load("outbox", "list_locking_consumers"))
    rows = connection.execute(
        load("outbox", "list_foreign_locks"),
        {
            "class": LOCK_CLASS,
            "classes": [LOCK_CLASS, *(consumer_class(name) for (name,) in consumers)],
            "outbox_bell": int(Lock.OUTBOX_DOORBELL),
            "inbox_bell": int(Lock.INBOX_DOORBELL),
            "roles": list(trusted),
        },
    )
    return [_Foreign(*row) for row in rows]


def _consequences(session: _Foreign) -> Iterator[tuple[Severity, str]]:
    if session.locks:
        yield (
            Severity.ERROR,
            f"holds {session.locks} of our advisory locks: relays,"
            " consumers or the upkeep are waiting for it",
        )
    if session.rings:
        yield (
            Severity.WARNING,
            "holds a doorbell: every insert sends a NOTIFY, and their commits wait"
            " for each other",
        )
    if session.muffles:
        yield (
            Severity.WARNING,
            "holds a doorbell in shared mode without having written anything: idle"
            " relays or consumers can't sleep, and poll",
        )
