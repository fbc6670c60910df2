"""Reject a superuser's session that would run what others can change.

A view, function or trigger of a less privileged role does what it likes with the rights
of the session. `SET ROLE` doesn't help: a function can `RESET ROLE`.
"""

from typing import Final

from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.postgres.connection import PIN_SEARCH_PATH_LOCALLY, Connection
from pillarbox.outbox.postgres.sql_files import load

LIST_LESSER_OWNERS: Final = load("outbox", "list_lesser_owners")


async def refuse_superuser(connection: Connection) -> None:
    """Make sure that nobody but superusers can change what this superuser would run.

    Raises:
        ConfigError: members of the owner's role can.
    """
    async with connection.transaction():
        await connection.execute(PIN_SEARCH_PATH_LOCALLY)
        cursor = await connection.execute(LIST_LESSER_OWNERS)
        for finding, remedy in await cursor.fetchall():
            raise ConfigError(f"{finding}; {remedy}")
