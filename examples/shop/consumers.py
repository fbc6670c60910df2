"""Billing and shipping: `inbox run examples.shop.consumers:billing`."""

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from examples.shop.effects import effect
from examples.shop.orders import TOPIC
from inbox import Consumer
from outbox import Message
from outbox.command import BROKER_VARIABLE, DATABASE_VARIABLE, url_of
from outbox.database import sqlalchemy_url

_database = sqlalchemy_url(url_of(None, "database", DATABASE_VARIABLE))
_broker = url_of(None, "broker", BROKER_VARIABLE)

# Billing is written with async handlers, shipping with plain functions: both work.
billing = Consumer(
    _broker,
    async_sessionmaker(create_async_engine(_database, pool_size=16)),
    name="billing",
    max_in_flight=16,
)
shipping = Consumer(
    _broker,
    sessionmaker(create_engine(_database, pool_size=8)),
    name="shipping",
    max_in_flight=8,
)


@billing.handles(TOPIC)
async def bill(session: AsyncSession, message: Message) -> None:
    """Write an invoice, or a credit note."""
    session.add(effect("billing", message))


@shipping.handles(TOPIC)
def ship(session: Session, message: Message) -> None:
    """Pack a parcel, or take it back."""
    session.add(effect("shipping", message))
