"""Billing and shipping: `inbox run examples.shop.consumers:billing`."""

import os

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from examples.shop.model import Handled
from inbox import Consumer
from outbox import Message
from outbox.database import sqlalchemy_url

_database = sqlalchemy_url(os.environ["PILLARBOX_DATABASE_URL"])
_broker = os.environ["PILLARBOX_BROKER_URL"]

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


def effect(consumer: str, kind: str, message: Message) -> Handled:
    """Build the row that stands for what a handler did."""
    order = message.json()
    return Handled(
        consumer=consumer,
        effect=kind,
        message_id=message.id,
        customer=order["customer"],
        step=order["step"],
    )


@billing.handles("orders.placed")
async def invoice(session: AsyncSession, message: Message) -> None:
    """Write an invoice."""
    session.add(effect("billing", "invoice", message))


@billing.handles("orders.cancelled")
async def credit(session: AsyncSession, message: Message) -> None:
    """Write a credit note."""
    session.add(effect("billing", "credit note", message))


@shipping.handles("orders.*")
def parcel(session: Session, message: Message) -> None:
    """Pack a parcel, or unpack it."""
    kind = "parcel" if message.topic == "orders.placed" else "return"
    session.add(effect("shipping", kind, message))
