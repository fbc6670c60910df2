"""Which topics a consumer of the postgres broker gets."""

from collections.abc import Sequence

from outbox.postgres.connection import Connection
from outbox.postgres.sql_files import load


async def subscribe(
    connection: Connection, consumer: str, topics: Sequence[str]
) -> None:
    """Have deliveries made for the consumer from now on; twice is harmless."""
    await connection.execute(
        load("inbox", "subscribe"), {"consumer": consumer, "topics": list(topics)}
    )


async def unsubscribe(
    connection: Connection, consumer: str, topics: Sequence[str]
) -> list[str]:
    """Have none made any more; give the topics that it was subscribed to."""
    cursor = await connection.execute(
        load("inbox", "unsubscribe"), {"consumer": consumer, "topics": list(topics)}
    )
    return [topic async for (topic,) in cursor]
