"""The topics that a consumer of the postgres broker receives."""

from collections.abc import Sequence

from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load


async def subscribe(
    connection: Connection, consumer: str, topics: Sequence[str]
) -> list[str]:
    """Subscribe a consumer to topics from now on; return those that it had before.

    Repeating it is harmless.
    """
    cursor = await connection.execute(
        load("inbox", "subscribe"), {"consumer": consumer, "topics": list(topics)}
    )
    return [topic async for (topic,) in cursor]


async def unsubscribe(
    connection: Connection, consumer: str, topics: Sequence[str]
) -> list[str]:
    """Unsubscribe a consumer from topics; return those that it was subscribed to."""
    cursor = await connection.execute(
        load("inbox", "unsubscribe"), {"consumer": consumer, "topics": list(topics)}
    )
    return [topic async for (topic,) in cursor]
