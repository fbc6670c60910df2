"""A counter whose handlers get connections of a psycopg pool."""

import os

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool

from pillarbox import Consumer, Message
from tests.acceptance.counter import NAME, source_of

_COUNT = "INSERT INTO counted (message_id, key, number, pid) VALUES (%s, %s, %s, %s)"


async def count(connection: AsyncConnection, message: Message) -> None:
    values = (message.id, message.key, int(message.payload), os.getpid())
    await connection.execute(_COUNT, values)


def counter() -> Consumer:
    """Create the consumer; without a broker URL, its database is also its broker."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    pool = AsyncConnectionPool(url, max_size=8, open=False)
    source = source_of(os.environ.get("PILLARBOX_BROKER_URL", url))
    consumer = Consumer(source, pool, name=NAME, max_in_flight=8)
    consumer.handles("numbers.*")(count)
    return consumer
