"""Billing and shipping: `pillarbox consume pillarbox.inbox.demo.consumers:billing`."""

from datetime import timedelta
from typing import Final

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Consumer, Message
from pillarbox.inbox.demo.model import Handled, Outage
from pillarbox.inbox.demo.orders import TOPIC, is_ours
from pillarbox.outbox.cli.command import BROKER_VARIABLE, DATABASE_VARIABLE, url_of
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.retry import RetryPolicy

_database = sqlalchemy_url(url_of(None, "database", DATABASE_VARIABLE))
_broker = url_of(None, "broker", BROKER_VARIABLE)
_EFFECTS: Final = {
    "billing": {"placed": "invoice", "cancelled": "credit note"},
    "shipping": {"placed": "parcel", "cancelled": "return"},
}

# Billing uses async handlers, shipping plain functions: both work.
billing = Consumer(
    _broker,
    async_sessionmaker(create_async_engine(_database, pool_size=16)),
    name="billing",
    max_in_flight=16,
    # Short, so that the demo does not wait long; the default is 8 retries over minutes.
    retry=RetryPolicy(
        max_attempts=4,
        first_delay=timedelta(milliseconds=50),
        max_delay=timedelta(milliseconds=200),
    ),
)
shipping = Consumer(
    _broker,
    sessionmaker(create_engine(_database, pool_size=8)),
    name="shipping",
    max_in_flight=8,
)


class LedgerDownError(Exception):
    """The ledger that billing writes to is unavailable; it may work again later."""


@billing.handles(TOPIC)
async def bill(session: AsyncSession, message: Message) -> None:
    """Write an invoice, or a credit note."""
    if not is_ours(message):
        return
    if await session.get(Outage, message.key) is not None:
        raise LedgerDownError("the ledger does not answer")
    session.add(_effect("billing", message))


@shipping.handles(TOPIC)
def ship(session: Session, message: Message) -> None:
    """Pack a parcel, or cancel it."""
    if is_ours(message):
        session.add(_effect("shipping", message))


def _effect(consumer: str, message: Message) -> Handled:
    order = message.json()
    return Handled(
        consumer=consumer,
        effect=_EFFECTS[consumer][order["kind"]],
        message_id=message.id,
        customer=order["customer"],
        step=order["step"],
    )
