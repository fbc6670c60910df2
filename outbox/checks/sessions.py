"""What other sessions do to us: nobody relays, or somebody keeps dead rows alive."""

from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from outbox.administration import AdministrationConnection
from outbox.check import Finding, Names, Severity

_BACKLOG: Final = timedelta(minutes=15)
_OLDEST: Final = """
SELECT now() - min(greatest(m.created_at, m.available_at)),
       (SELECT retention FROM outbox.partition_policy
         WHERE parent_table = 'outbox.message')
  FROM outbox.message m
 WHERE m.published_at IS NULL AND m.dead_lettered_at IS NULL
   AND (m.available_at IS NULL OR m.available_at <= now())
"""
_SLOTS: Final = """
SELECT slot_name, active, age(coalesce(xmin, catalog_xmin)) FROM pg_replication_slots
 WHERE NOT active OR age(coalesce(xmin, catalog_xmin)) > 1000000
"""
_PREPARED: Final = """
SELECT gid, prepared FROM pg_prepared_xacts
 WHERE database = current_database() AND prepared < now() - interval '1 hour'
"""
_TRANSACTIONS: Final = """
SELECT pid, usename, state, now() - xact_start FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend'
   AND xact_start < now() - interval '1 hour'
"""
_SEES_ALL: Final = "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"


def check_backlog(
    connection: AdministrationConnection, _names: Names
) -> Iterator[Finding]:
    """Find messages that are due and that nobody publishes."""
    waited, retention = connection.execute(_OLDEST).fetchone() or (None, None)
    if waited is not None and waited > _BACKLOG:
        late = retention is not None and waited > retention / 2
        yield Finding(
            check="backlog",
            severity=Severity.ERROR if late else Severity.WARNING,
            finding=f"the oldest message that is due has waited for {waited}"
            + (", half its retention: its day will be held" if late else ""),
            remedy="start a relay: relay run --broker …; or see its log",
        )


def check_pins(
    connection: AdministrationConnection, _names: Names
) -> Iterator[Finding]:
    """Find what keeps dead rows from being removed, and a detach from ending."""
    for slot, active, age in connection.execute(_SLOTS):
        yield _found(
            f"replication slot {slot}, "
            + ("active" if active else "that nobody reads,")
            + (f" keeps {age} transactions back" if age else " keeps WAL"),
            f"SELECT pg_drop_replication_slot('{slot}');  -- or start its reader",
        )
    for gid, prepared in connection.execute(_PREPARED):
        yield _found(
            f"the transaction {gid!r} is prepared since {prepared:%F %R}",
            f"COMMIT PREPARED '{gid}';  -- or ROLLBACK PREPARED",
        )
    for pid, user, state, since in connection.execute(_TRANSACTIONS):
        yield _found(
            f"a transaction of {user} (pid {pid}, {state}) is open for {since}: days"
            " can't be detached, dead rows not removed",
            f"SELECT pg_terminate_backend({pid});",
        )
    if connection.execute(_SEES_ALL).fetchone() != (True,):
        yield Finding(
            check="pins",
            severity=Severity.UNKNOWN,
            finding="how long transactions of other roles are open can't be seen",
            remedy="GRANT pg_monitor TO the role that runs outbox doctor",
        )


def _found(finding: str, remedy: str) -> Finding:
    return Finding(
        check="pins", severity=Severity.WARNING, finding=finding, remedy=remedy
    )
