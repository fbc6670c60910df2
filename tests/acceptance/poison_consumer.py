"""A consumer with a message that kills its process."""

import os
import signal
from collections.abc import Sequence
from datetime import timedelta

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from pillarbox import Consumer
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.retry import RetryPolicy
from tests.acceptance.counter import source_of

NAME = "poisoned"
POISON = b"poison"
TOPIC = "numbers.fatal"
MAX_ATTEMPTS = 3


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
