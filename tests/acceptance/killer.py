"""A consumer with a handler that one message kills, with all of its process."""

import os
import signal
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from inbox import Consumer
from inbox.source import Source
from inbox.sources.redis import RedisSource
from outbox.database import sqlalchemy_url
from outbox.message import Message
from outbox.retry import RetryPolicy

POISON = b"poison"
TOPIC = "numbers.fatal"
MAX_ATTEMPTS = 3


async def note(session: AsyncSession, message: Message) -> None:
    """Note the number of a message, or die."""
    if message.payload == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    await session.execute(
        text("INSERT INTO noted VALUES (:number)"), {"number": int(message.payload)}
    )


def killer() -> Consumer:
    """Make the consumer."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    broker = os.environ["PILLARBOX_BROKER_URL"]
    source: Source | str = broker
    if broker.startswith("redis:"):
        source = RedisSource(
            broker,
            consumer="killer",
            topics=[TOPIC],
            reclaim_after=timedelta(seconds=1),
        )
    consumer = Consumer(
        source,
        async_sessionmaker(create_async_engine(sqlalchemy_url(url))),
        name="killer",
        retry=RetryPolicy(
            max_attempts=MAX_ATTEMPTS, first_delay=timedelta(milliseconds=50)
        ),
    )
    consumer.handles(TOPIC)(note)
    return consumer
