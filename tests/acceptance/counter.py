"""A consumer that records each message it handles, so that tests can count them.

Nothing but the inbox prevents a message from being recorded twice.
"""

import os
from datetime import timedelta
from typing import Any, Final
from uuid import UUID

from psycopg import AsyncConnection
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import BigInteger, Identity, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from inbox.source import Source
from inbox.sources.nats import NatsSource
from inbox.sources.redis import RedisSource
from outbox.message import Message
from outbox.postgres.connection import sqlalchemy_url
from outbox.retry import RetryPolicy
from pillarbox import Consumer
from tests.fixtures.urls import with_options

NAME: Final = "counter"
COUNTED: Final = "numbers.counted"
DOUBTED: Final = "numbers.doubted"
TOPICS: Final = (COUNTED, DOUBTED)
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


async def count_on_connection(connection: AsyncConnection, message: Message) -> None:
    values = (message.id, message.key, int(message.payload), os.getpid())
    await connection.execute(
        "INSERT INTO counted (message_id, key, number, pid) VALUES (%s, %s, %s, %s)",
        values,
    )


async def count_unless_in_doubt(session: AsyncSession, message: Message) -> None:
    """Count the message, but raise while the table `doubt` contains a row."""
    await count(session, message)
    await session.flush()
    if await session.scalar(text("SELECT count(*) FROM doubt")):
        raise ValueError("in doubt")


def counter() -> Consumer:
    """Create the consumer; without a broker URL, its database is also its broker."""
    consumer = _consumer(
        _sessions(), retry=RetryPolicy(first_delay=timedelta(milliseconds=50))
    )
    consumer.handles(COUNTED)(count)
    consumer.handles(DOUBTED)(count_unless_in_doubt)
    return consumer


def impatient() -> Consumer:
    """Create a counter whose transactions can be idle for at most 2 s."""
    consumer = _consumer(_sessions(), max_idle=timedelta(seconds=2))
    consumer.handles("numbers.*")(count)
    return consumer


def pooled() -> Consumer:
    """Create a counter whose handlers get connections of a psycopg pool."""
    consumer = _consumer(AsyncConnectionPool(_database(), max_size=8, open=False))
    consumer.handles("numbers.*")(count_on_connection)
    return consumer


def _consumer(connections: Any, **options: Any) -> Consumer:
    source = source_of(os.environ.get("PILLARBOX_BROKER_URL", _database()))
    return Consumer(source, connections, name=NAME, max_in_flight=8, **options)


def _database() -> str:
    return os.environ["PILLARBOX_DATABASE_URL"]


def _sessions() -> async_sessionmaker[AsyncSession]:
    engine = create_async_engine(sqlalchemy_url(_database()), pool_size=8)
    return async_sessionmaker(engine)


def source_of(url: str) -> Source | str:
    """Create a source that soon takes over the messages of a dead counter."""
    if url.startswith("redis:"):
        url = with_options(url, reclaim_after=HOLD)
        return RedisSource(url, consumer=NAME, topics=TOPICS)
    if url.startswith("nats:"):
        url = with_options(url, ack_wait=HOLD)
        return NatsSource(url, consumer=NAME, topics=TOPICS)
    return url
