"""A consumer with a handler that one message kills, with all of its process."""

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

NAME = "killer"
POISON = b"poison"
TOPIC = "numbers.fatal"
MAX_ATTEMPTS = 3
HOLD = timedelta(seconds=2)
"""After which what a dead one held goes to another, if nobody says it is gone."""


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
    consumer = Consumer(
        source_of(os.environ["PILLARBOX_BROKER_URL"]),
        async_sessionmaker(create_async_engine(sqlalchemy_url(url))),
        name=NAME,
        retry=RetryPolicy(
            max_attempts=MAX_ATTEMPTS, first_delay=timedelta(milliseconds=50)
        ),
    )
    consumer.handles(TOPIC)(note)
    return consumer


def source_of(url: str) -> Source | str:
    """Make what needn't wait long for what a dead one held."""
    if url.startswith("redis:"):
        return RedisSource(url, consumer=NAME, topics=[TOPIC], reclaim_after=HOLD)
    if url.startswith("nats:"):
        return NatsSource(url, consumer=NAME, topics=[TOPIC], ack_wait=HOLD)
    if url.startswith("sqs:"):
        settings = SqsSettings.from_url(url)
        return SqsSource(settings, consumer=NAME, topics=[TOPIC], visibility=HOLD)
    return url
