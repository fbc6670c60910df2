"""Each service handles the other's messages, also those of an older version."""

import json
from collections.abc import Iterator
from decimal import Decimal
from uuid import uuid4

import pytest
from sqlalchemy import create_engine, func
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Message, add, sqlalchemy_url
from pillarbox.testing import Databases, drain
from shop_invoicing import service as invoicing
from shop_orders import service as orders

pytest_plugins = ["pillarbox.outbox.testing.plugin"]


@pytest.fixture
def sessions(pillarbox_databases: Databases) -> Iterator[sessionmaker[Session]]:
    """One database for both services: their tests need no broker."""
    with pillarbox_databases.new() as url:
        engine = create_engine(sqlalchemy_url(url))
        for base in (orders.Base, invoicing.Base):
            base.metadata.create_all(engine)
        yield sessionmaker(engine)
        engine.dispose()


async def test_an_order_gets_the_number_of_its_invoice(
    sessions: sessionmaker[Session],
) -> None:
    with sessions.begin() as session:
        id = orders.place(session, "Ada Lovelace", Decimal("9.50"))

    drained = await drain(orders.consumer, invoicing.consumer, sessions=sessions)

    assert drained.topics == ["orders.placed", "invoices.issued"]
    with sessions() as session:
        number = session.get_one(orders.Order, id).invoice
        assert number == session.get_one(invoicing.Invoice, id).number


async def test_an_order_of_the_release_before_is_in_euros(
    sessions: sessionmaker[Session],
) -> None:
    id = uuid4()
    placed = {"order_id": str(id), "customer": "Ada Lovelace", "amount": "9.50"}
    with sessions.begin() as session:
        # Here, only the current version of the event is declared.
        session.execute(func.outbox.add("orders.placed", json.dumps(placed).encode()))

    await drain(invoicing.consumer, sessions=sessions)

    with sessions() as session:
        assert session.get_one(invoicing.Invoice, id).currency == "EUR"


async def test_a_cancelled_order_has_no_invoice(
    sessions: sessionmaker[Session],
) -> None:
    with sessions.begin() as session:
        id = orders.place(session, "Ada Lovelace", Decimal("9.50"))
    await drain(orders.consumer, invoicing.consumer, sessions=sessions)
    with sessions.begin() as session:
        orders.cancel(session, id)

    await drain(orders.consumer, invoicing.consumer, sessions=sessions)

    with sessions() as session:
        assert session.get(invoicing.Invoice, id) is None


async def test_an_invoice_names_the_order_that_was_lost(
    sessions: sessionmaker[Session],
) -> None:
    id = uuid4()
    with sessions.begin() as session:
        issued = {"order_id": id, "number": "INV-1"}
        add(session, Message("invoices.issued", issued))

    drained = await drain(orders.consumer, sessions=sessions)

    (lost,) = drained.dead_lettered
    assert lost.reason.endswith(f"no order {id}")
