"""The consumer: it writes an invoice for each order."""

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from orders.database import BROKER, Invoice, sessions
from orders.events import OrderPlaced
from pillarbox import Consumer, DeadLetter, RetryPolicy

consumer = Consumer(
    BROKER,
    sessions,
    name="billing",
    retry=RetryPolicy(max_attempts=3, max_delay=timedelta(seconds=2)),
)


@consumer.handles("orders.placed")
async def bill(session: AsyncSession, order: OrderPlaced) -> None:
    if order.amount <= 0:
        raise DeadLetter("there is nothing to bill")
    surname = order.customer.split()[-1]
    session.add(Invoice(order_id=order.order_id, surname=surname, amount=order.amount))
