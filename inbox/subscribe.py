"""Subscribe a consumer of the postgres broker to topics."""

from collections.abc import Sequence

from outbox.database import Connection
from outbox.statement import load


async def subscribe(
    connection: Connection, consumer: str, topics: Sequence[str]
) -> None:
    """Have deliveries made for the consumer from now on; twice is harmless."""
    await connection.execute(
        load("inbox", "subscribe"), {"consumer": consumer, "topics": list(topics)}
    )
