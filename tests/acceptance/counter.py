"""A consumer to count at: it writes down each message that it handles.

Nothing but the inbox keeps a message from being written down twice.
"""

import os
from datetime import timedelta
from uuid import UUID

from sqlalchemy import BigInteger, Identity, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from inbox import Consumer
from outbox.database import sqlalchemy_url
from outbox.message import Message
from outbox.retry import RetryPolicy


class Base(DeclarativeBase):
    pass


class Counted(Base):
    """One handling of a message; `position` grows within a key."""

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


async def count_unless_in_doubt(session: AsyncSession, message: Message) -> None:
    """Count, but raise as long as the table `doubt` has a row."""
    await count(session, message)
    await session.flush()
    if await session.scalar(text("SELECT count(*) FROM doubt")):
        raise ValueError("in doubt")


def counter() -> Consumer:
    """Make the consumer; its database is its broker, too."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    sessions = async_sessionmaker(create_async_engine(sqlalchemy_url(url), pool_size=8))
    consumer = Consumer(
        url,
        sessions,
        name="counter",
        max_in_flight=8,
        retry=RetryPolicy(first_delay=timedelta(milliseconds=50)),
    )
    consumer.handles("numbers.counted")(count)
    consumer.handles("numbers.doubted")(count_unless_in_doubt)
    return consumer
