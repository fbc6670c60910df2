"""A consumer that records each message it handles, so that tests can count them.

Nothing but the inbox prevents a message from being recorded twice.
"""

import os
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import BigInteger, Identity
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pillarbox import Consumer
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.urls import with_options

NAME: Final = "counter"
TOPIC: Final = "numbers.counted"
HOLD: Final = timedelta(seconds=2)
"""After this, another counter receives the messages that a dead one held."""


class Base(DeclarativeBase):
    pass


class Counted(Base):
    """One handling of a message; `position` increases within a key."""

    __tablename__ = "counted"

    position: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    message_id: Mapped[UUID]
    key: Mapped[str]
    number: Mapped[int]
    pid: Mapped[int]


async def count(session: AsyncSession, message: Message) -> None:
    session.add(
        Counted(
            message_id=message.id,
            key=message.key,
            number=int(message.payload),
            pid=os.getpid(),
        )
    )


_failed: Final = set[UUID]()


async def count_clumsily(session: AsyncSession, message: Message) -> None:
    """Count, but fail at the first attempt of some messages in this process."""
    await count(session, message)
    if message.id.int % 50 == 0 and message.id not in _failed:
        _failed.add(message.id)
        await session.flush()
        raise ValueError("clumsy")


async def count_on_connection(connection: AsyncConnection, message: Message) -> None:
    values = (message.id, message.key, int(message.payload), os.getpid())
    await connection.execute(
        "INSERT INTO counted (message_id, key, number, pid) VALUES (%s, %s, %s, %s)",
        values,
    )


def counter() -> Consumer:
    """Create the consumer; without a broker URL, its database is also its broker."""
    return _consumer(
        count, _sessions(), retry=RetryPolicy(first_delay=timedelta(milliseconds=50))
    )


def impatient() -> Consumer:
    """Create a counter whose transactions can be idle for at most 2 s."""
    return _consumer(count, _sessions(), max_idle=timedelta(seconds=2))


def clumsy() -> Consumer:
    """Create an impatient counter that fails now and then, and tries again soon."""
    soon, at_most = timedelta(milliseconds=50), timedelta(seconds=2)
    return _consumer(
        count_clumsily,
        _sessions(),
        max_idle=timedelta(seconds=2),
        retry=RetryPolicy(first_delay=soon, max_delay=at_most),
    )


def pooled() -> Consumer:
    """Create a counter whose handlers get connections of a psycopg pool."""
    pool = AsyncConnectionPool(_database(), max_size=8, open=False)
    return _consumer(count_on_connection, pool)


def wide() -> Consumer:
    """Create a counter with more handlers at a time than there are lanes of a class."""
    return _consumer(count, _sessions(24), max_in_flight=24)


def _consumer(handler: Any, connections: Any, **options: Any) -> Consumer:
    source = source_of(os.environ.get("PILLARBOX_BROKER_URL", _database()))
    options = {"max_in_flight": 8, **options}
    consumer = Consumer(source, connections, name=NAME, **options)
    consumer.handles(TOPIC)(handler)
    return consumer


def _database() -> str:
    return os.environ["PILLARBOX_DATABASE_URL"]


def _sessions(size: int = 8) -> async_sessionmaker[AsyncSession]:
    engine = create_async_engine(sqlalchemy_url(_database()), pool_size=size)
    return async_sessionmaker(engine)


def source_of(url: str) -> str:
    """Add an option, so that it soon takes over the messages of a dead counter."""
    if url.startswith("redis"):
        return with_options(url, reclaim_after=HOLD)
    if url.startswith("nats:"):
        return with_options(url, ack_wait=HOLD)
    if url.startswith("sqs:"):
        return with_options(url, visibility=HOLD)
    return url
