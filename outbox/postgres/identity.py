"""Which outbox a session has reached, whatever its URL."""

from typing import Any

from pillarbox.outbox.postgres.connection import Connection
from pillarbox.outbox.postgres.sql_files import load


async def identify_outbox(connection: Connection) -> str:
    """Return what tells the outbox of this database apart from all others."""
    cursor = await connection.execute(load("outbox", "identify_outbox"))
    row: Any = await cursor.fetchone()
    return str(row[0])
