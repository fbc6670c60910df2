"""Billing and shipping behind one endpoint: `uvicorn examples.shop.hook:app`.

Over HTTP a relay has one target. Each consumer still has its own receipts.
"""

import logging
import os

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from inbox.demo.effects import effect
from inbox.demo.orders import TOPIC
from inbox.webhook import webhook_app
from outbox.cli.command import DATABASE_VARIABLE, url_of
from outbox.observability.logging import LogEvents
from outbox.postgres.connection import sqlalchemy_url
from pillarbox import Message, guard

_database = sqlalchemy_url(url_of(None, "database", DATABASE_VARIABLE))


async def handle(session: AsyncSession, message: Message) -> None:
    """Bill and ship an order, each once."""
    for consumer in ("billing", "shipping"):
        async with guard(session, message.id, consumer=consumer) as is_new:
            if is_new:
                session.add(effect(consumer, message))


logging.basicConfig(level=logging.DEBUG, format="%(asctime)s %(message)s")
app = webhook_app(
    {TOPIC: handle},
    async_sessionmaker(create_async_engine(_database, pool_size=16)),
    name="shop",
    secrets=[os.environ["SHOP_SECRET"]],
    max_in_flight=16,
    observers=[LogEvents()],
)
