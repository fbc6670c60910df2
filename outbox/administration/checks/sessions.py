"""Other sessions that keep vacuum from removing rows, or a detach from finishing."""

from collections.abc import Iterator

from outbox.administration.check import Finding, Installation, Severity
from outbox.administration.connection import AdministrationConnection
from outbox.duration import write_duration
from outbox.postgres.sql_files import load


def check_pins(
    connection: AdministrationConnection, _here: Installation
) -> Iterator[Finding]:
    """Find what keeps vacuum from removing dead rows, or a detach from finishing."""
    for slot, quoted, active, age in connection.execute(load("outbox", "list_slots")):
        yield _found(
            f"replication slot {slot}, "
            + ("active," if active else "which has no reader,")
            + (f" holds back {age} transactions" if age else " retains WAL"),
            f"SELECT * FROM pg_stat_replication WHERE pid = (SELECT active_pid FROM"  # noqa: S608 - for a person to read
            f" pg_catalog.pg_replication_slots WHERE slot_name = {quoted});"
            "  -- its reader, and how far it has come"
            if active
            else f"SELECT pg_drop_replication_slot({quoted});  -- or start its reader",
        )
    for gid, quoted, prepared in connection.execute(load("outbox", "list_prepared")):
        yield _found(
            f"the transaction {gid!r} has been prepared since {prepared:%F %R}",
            f"COMMIT PREPARED {quoted};  -- or ROLLBACK PREPARED",
        )
    for pid, user, state, since in connection.execute(
        load("outbox", "list_long_transactions")
    ):
        yield _found(
            f"a transaction of {user} (pid {pid}, {state}) has been open for"
            f" {write_duration(since)}: partitions can't be detached, nor"
            " dead rows removed",
            f"SELECT pg_terminate_backend({pid});",
        )
    sees_all, role = sees_all_sessions(connection)
    if not sees_all:
        yield Finding(
            check="pins",
            severity=Severity.UNKNOWN,
            finding="this role can't see how long transactions of others have been"
            " open",
            remedy=f"GRANT pg_monitor TO {role};",
        )


def sees_all_sessions(connection: AdministrationConnection) -> tuple[bool, str]:
    """Return whether this role sees what other sessions do, and its name in SQL."""
    ((sees_all, role),) = connection.execute(load("outbox", "sees_all_sessions"))
    return sees_all, role


def _found(finding: str, remedy: str) -> Finding:
    return Finding(
        check="pins", severity=Severity.WARNING, finding=finding, remedy=remedy
    )
