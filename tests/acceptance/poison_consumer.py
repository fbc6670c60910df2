"""A consumer whose process is killed by one of its messages."""

import os
import signal
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from inbox import Consumer
from inbox.source import Source
from inbox.sources.nats import NatsSource
from inbox.sources.redis import RedisSource
from inbox.sources.sqs import SqsSource
from outbox.brokers.sqs.connection import SqsSettings
from outbox.message import Message
from outbox.postgres.connection import sqlalchemy_url
from outbox.retry import RetryPolicy

NAME = "poisoned"
POISON = b"poison"
TOPIC = "numbers.fatal"
MAX_ATTEMPTS = 3
HOLD = timedelta(seconds=2)
"""After which the messages of a dead consumer go to another at the latest."""


async def note(session: AsyncSession, message: Message) -> None:
    """Note the number of a message, or die."""
    if message.payload == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    await session.execute(
        text("INSERT INTO noted VALUES (:number)"), {"number": int(message.payload)}
    )


def consumer() -> Consumer:
    """Make the consumer."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    made = Consumer(
        source_of(os.environ["PILLARBOX_BROKER_URL"]),
        async_sessionmaker(create_async_engine(sqlalchemy_url(url))),
        name=NAME,
        retry=RetryPolicy(
            max_attempts=MAX_ATTEMPTS, first_delay=timedelta(milliseconds=50)
        ),
    )
    made.handles(TOPIC)(note)
    return made


def source_of(url: str) -> Source | str:
    """Make a source that takes over the messages of a dead consumer soon."""
    if url.startswith("redis:"):
        return RedisSource(url, consumer=NAME, topics=[TOPIC], reclaim_after=HOLD)
    if url.startswith("nats:"):
        return NatsSource(url, consumer=NAME, topics=[TOPIC], ack_wait=HOLD)
    if url.startswith("sqs:"):
        settings = SqsSettings.from_url(url, visibility=HOLD)
        return SqsSource(settings, consumer=NAME, topics=[TOPIC])
    return url
