"""FastStream: subscribers behind a middleware that knows the receipts."""

from typing import Annotated

from faststream import Context
from faststream.nats import NatsBroker
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from examples.frameworks.billing import invoice
from inbox.frameworks.faststream import Idempotent


def make_broker(url: str, sessions: async_sessionmaker[AsyncSession]) -> NatsBroker:
    """Make a broker whose subscribers bill each order once."""
    broker = NatsBroker(url, middlewares=[Idempotent(sessions, consumer="billing")])

    @broker.subscriber("orders.placed")
    async def bill(
        order: dict[str, int], session: Annotated[AsyncSession, Context("session")]
    ) -> None:
        await session.execute(invoice(order["order_id"]))

    return broker
