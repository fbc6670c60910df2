"""The index by tenant of the outbox's messages, which is its owner's choice.

With it, consumers that read the outbox find the first messages of each tenant behind
any flood of others. It holds only messages that have a tenant. Days that are added
later get it with the table's other indexes.
"""

from datetime import timedelta
from typing import Final

from psycopg.sql import SQL, Identifier, Literal

from pillarbox.outbox.administration.connection import AdministrationConnection
from pillarbox.outbox.postgres.sql_files import load

_LOCK_TIMEOUT: Final = timedelta(seconds=10)
"""How long to wait for the table, while writers queue."""


def add_tenant_index(connection: AdministrationConnection) -> None:
    """Make the index day by day, while messages are added; can be interrupted.

    Args:
        connection: in autocommit mode.
    """
    _limit_locks(connection, _LOCK_TIMEOUT)
    connection.execute(load("outbox", "add_tenant_index"))
    days = connection.execute(load("outbox", "list_unindexed_days")).fetchall()
    for schema, day, name, is_valid in days:
        index = Identifier(schema, name)
        # It waits for transactions, but nobody waits for it.
        _limit_locks(connection, timedelta())
        if is_valid is False:
            connection.execute(SQL("DROP INDEX CONCURRENTLY {}").format(index))
        if not is_valid:
            connection.execute(
                SQL(
                    "CREATE INDEX CONCURRENTLY {} ON {} (tenant, lane, seq)"
                    " WHERE tenant IS NOT NULL"
                ).format(Identifier(name), Identifier(schema, day))
            )
        _limit_locks(connection, _LOCK_TIMEOUT)
        connection.execute(
            SQL("ALTER INDEX outbox.message_tenant_idx ATTACH PARTITION {}").format(
                index
            )
        )


def drop_tenant_index(connection: AdministrationConnection) -> None:
    """Drop the index.

    Args:
        connection: in autocommit mode.
    """
    _limit_locks(connection, _LOCK_TIMEOUT)
    connection.execute(load("outbox", "drop_tenant_index"))


def _limit_locks(connection: AdministrationConnection, limit: timedelta) -> None:
    text = Literal(f"{limit.total_seconds():.0f}s")
    connection.execute(SQL("SET lock_timeout = {}").format(text))
