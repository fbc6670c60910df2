"""The shop: an order is placed, announced and billed."""

from collections.abc import AsyncIterator
from decimal import Decimal
from uuid import uuid4

import pytest
from httpx2 import ASGITransport, AsyncClient
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from orders.app import NewOrder, app, place, transaction
from orders.billing import bill, consumer
from orders.database import Invoice
from orders.events import OrderPlaced
from pillarbox.testing import added, drain

Sessions = async_sessionmaker[AsyncSession]
ADA = {"customer": "Ada Lovelace", "amount": "9.50"}


@pytest.fixture
async def client(sessions: Sessions) -> AsyncIterator[AsyncClient]:
    """A client of the application, whose routes use the test's database."""

    async def in_test() -> AsyncIterator[AsyncSession]:
        async with sessions.begin() as session:
            yield session

    app.dependency_overrides[transaction] = in_test
    async with AsyncClient(transport=ASGITransport(app), base_url="http://t") as client:
        yield client
    app.dependency_overrides.clear()


async def test_an_order_is_announced(session: AsyncSession) -> None:
    placed = await place(NewOrder(customer="Ada Lovelace", amount=Decimal(9)), session)
    assert added(session, OrderPlaced) == [placed]


@pytest.mark.parametrize("customer", ["Ada Lovelace", "Lovelace", "A. King Lovelace"])
async def test_the_surname_is_on_the_invoice(
    session: AsyncSession, customer: str
) -> None:
    order = OrderPlaced(order_id=uuid4(), customer=customer, amount=Decimal(9))
    await bill(session, order)

    assert await session.scalar(select(Invoice.surname)) == "Lovelace"


async def test_an_order_is_billed_once(client: AsyncClient, sessions: Sessions) -> None:
    response = await client.post("/orders", json=ADA)
    assert response.status_code == 201

    drained = await drain(consumer, sessions=sessions)
    again = await drain(consumer, sessions=sessions)

    assert drained.topics == ["orders.placed"]
    assert again.topics == []
    async with sessions() as session:
        assert (await session.scalars(select(Invoice.amount))).all() == [Decimal("9.5")]


async def test_an_order_of_nothing_is_a_dead_letter(
    client: AsyncClient, sessions: Sessions
) -> None:
    await client.post("/orders", json=ADA | {"amount": "0"})

    drained = await drain(consumer, sessions=sessions)

    assert [letter.reason for letter in drained.dead_lettered] == [
        "DeadLetter: there is nothing to bill"
    ]
