"""Reject a pooler in transaction mode, which assigns a session per transaction.

Leases, the doorbell and the upkeep keep state in their session: advisory locks, LISTEN,
SET ROLE. In transaction mode the session's next client would inherit it.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Final
from uuid import uuid4

import psycopg
from psycopg.sql import SQL, Identifier

from pillarbox.outbox.errors import DatabaseUnavailableError, PoolerError, message_of
from pillarbox.outbox.postgres.connection import Connection, connect
from pillarbox.outbox.postgres.superuser import refuse_superuser
from pillarbox.outbox.url import without_password

_APPLICATION: Final = "pillarbox pooler check"
LIMIT = 60.0
"""Seconds for the whole check."""
RING_LIMIT = 10.0
"""Seconds within which a notification arrives, if it arrives at all."""


def refuse_pooler(url: str, *, any_role: bool = False) -> None:
    """Like `refuse_pooler_async`, with or without a running event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, refuse_pooler_async(url, any_role=any_role)).result()


async def refuse_pooler_async(url: str, *, any_role: bool = False) -> None:
    """Make sure that a connection keeps one server session to itself while it is open.

    Works however a pooler assigns its sessions and however busy it is. A pooler in
    session mode passes.

    Args:
        any_role: whether superusers pass that `refuse_superuser` would reject.

    Raises:
        PoolerError: the connection goes through a pooler in transaction mode.
        ConfigError: as for `refuse_superuser`.
        DatabaseUnavailableError: the database is unreachable.
    """
    try:
        async with (
            asyncio.timeout(LIMIT),
            await connect(url, application_name=_APPLICATION, shared=True) as one,
            await connect(url, application_name=_APPLICATION, shared=True) as other,
        ):
            own = await _has_own_session(one, other)
            if own and not any_role:
                await refuse_superuser(one)
    except TimeoutError:
        raise DatabaseUnavailableError(
            f"database {without_password(url)}: no answer within {LIMIT:.0f} s to two"
            " connections at once; allow more connections, or find out what slows it"
            " down"
        ) from None
    except psycopg.Error as error:
        raise DatabaseUnavailableError(
            f"database {without_password(url)}: {message_of(error)}"
        ) from error
    if not own:
        raise PoolerError(
            f"database URL {without_password(url)}: connects through a pooler in"
            " transaction mode, which breaks session locks, LISTEN and SET; use the"
            " URL of PostgreSQL itself, or of a pool in session mode"
        )


async def _has_own_session(one: Connection, other: Connection) -> bool:
    # Twice through one connection, for poolers that assign their sessions in turn; then
    # through the other, for those that first reuse the session returned last.
    first, second, others = [await _process(each) for each in (one, one, other)]
    if first != second or second == others:
        return False
    # If the server didn't report this process id, something in between made it up. Then
    # we may have got these sessions by chance, because of other clients' traffic.
    return one.info.backend_pid == first or await _is_rung(one, other)


async def _process(connection: Connection) -> int:
    cursor = await connection.execute("SELECT pg_catalog.pg_backend_pid()")
    row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def _is_rung(one: Connection, other: Connection) -> bool:
    """Return whether a notification from `other` reaches `one`, which sends nothing.

    It can't if `one` has no session between its transactions. In that case a LISTEN is
    left behind, for a name that is never used again.
    """
    channel = f"pillarbox_{uuid4().hex}"
    await one.execute(SQL("LISTEN {}").format(Identifier(channel)))
    await other.execute("SELECT pg_catalog.pg_notify(%s, '')", (channel,))
    async for _ in one.notifies(timeout=RING_LIMIT, stop_after=1):
        return True
    return False
