"""A counter whose transactions may stand still for 2 s only."""

import os
from datetime import timedelta

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from inbox import Consumer
from outbox.database import sqlalchemy_url
from tests.acceptance.counter import count


def counter() -> Consumer:
    """Make the consumer; its database is its broker, too."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    sessions = async_sessionmaker(create_async_engine(sqlalchemy_url(url), pool_size=8))
    consumer = Consumer(
        url,
        sessions,
        name="counter",
        max_in_flight=8,
        max_idle=timedelta(seconds=2),
    )
    consumer.handles("numbers.*")(count)
    return consumer
