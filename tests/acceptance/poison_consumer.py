"""A consumer with a message that kills its process."""

import os
import signal
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from outbox.message import Message
from outbox.postgres.connection import sqlalchemy_url
from outbox.retry import RetryPolicy
from pillarbox import Consumer
from tests.fixtures.urls import with_options

NAME = "poisoned"
POISON = b"poison"
TOPIC = "numbers.fatal"
MAX_ATTEMPTS = 3
HOLD = timedelta(seconds=2)
"""The longest time until another consumer receives the messages of a dead one."""


async def note(session: AsyncSession, message: Message) -> None:
    """Note the number of a message, or kill the process."""
    await note_many(session, [message])


async def note_many(session: AsyncSession, messages: Sequence[Message]) -> None:
    """Note the numbers of messages, or kill the process."""
    if any(message.payload == POISON for message in messages):
        os.kill(os.getpid(), signal.SIGKILL)
    await session.execute(
        text("INSERT INTO noted VALUES (:number)"),
        [{"number": int(message.payload)} for message in messages],
    )


def consumer() -> Consumer:
    """Create a consumer that handles messages one by one."""
    made = make()
    made.handles(TOPIC)(note)
    return made


def consumer_of_batches() -> Consumer:
    """Create a consumer that handles messages in batches."""
    made = make()
    made.handles_batch(TOPIC, max_size=20)(note_many)
    return made


def make() -> Consumer:
    """Create a consumer without a handler."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    return Consumer(
        source_of(os.environ["PILLARBOX_BROKER_URL"]),
        async_sessionmaker(create_async_engine(sqlalchemy_url(url))),
        name=NAME,
        retry=RetryPolicy(
            max_attempts=MAX_ATTEMPTS, first_delay=timedelta(milliseconds=50)
        ),
    )


def source_of(url: str) -> str:
    """Add an option, so that it soon takes over the messages of a dead consumer."""
    if url.startswith("redis:"):
        return with_options(url, reclaim_after=HOLD)
    if url.startswith("nats:"):
        return with_options(url, ack_wait=HOLD)
    if url.startswith("sqs:"):
        return with_options(url, visibility=HOLD)
    return url
