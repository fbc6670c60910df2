"""A counter whose transactions can be idle for at most 2 s."""

import os
from datetime import timedelta

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from outbox.postgres.connection import sqlalchemy_url
from pillarbox import Consumer
from tests.acceptance.counter import NAME, count, source_of


def counter() -> Consumer:
    """Create the consumer; without a broker URL, its database is also its broker."""
    url = os.environ["PILLARBOX_DATABASE_URL"]
    sessions = async_sessionmaker(create_async_engine(sqlalchemy_url(url), pool_size=8))
    consumer = Consumer(
        source_of(os.environ.get("PILLARBOX_BROKER_URL", url)),
        sessions,
        name=NAME,
        max_in_flight=8,
        max_idle=timedelta(seconds=2),
    )
    consumer.handles("numbers.*")(count)
    return consumer
