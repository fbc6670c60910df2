"""Write an invoice for each order, and tell other services."""

import os
from decimal import Decimal
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pillarbox import Consumer, Message, add, sqlalchemy_url

DATABASE = os.environ.get("PILLARBOX_DATABASE_URL", "postgresql:///invoicing")
BROKER = os.environ.get("PILLARBOX_BROKER_URL", "redis://127.0.0.1")
NAME = os.environ.get("CONSUMER_NAME", "invoicing")

sessions = sessionmaker(create_engine(sqlalchemy_url(DATABASE)))
consumer = Consumer(BROKER, sessions, name=NAME)


class Base(DeclarativeBase):
    pass


class Invoice(Base):
    __tablename__ = "invoices"

    order_id: Mapped[UUID] = mapped_column(primary_key=True)
    number: Mapped[str]
    amount: Mapped[Decimal]
    currency: Mapped[str] = mapped_column(server_default="EUR")


class OrderPlaced(BaseModel):
    """The fields of the event that this service reads; it ignores the others."""

    order_id: UUID
    amount: Decimal
    currency: str


@consumer.upcasts("orders.placed", to=2)
def with_currency(placed: Message) -> object:
    return {**placed.json(), "currency": "EUR"}


@consumer.handles("orders.placed", version=2)
def issue(session: Session, order: OrderPlaced) -> None:
    # The same number if the service is restored and handles the order again.
    invoice = Invoice(
        order_id=order.order_id,
        number=f"INV-{order.order_id.hex[:8]}",
        amount=order.amount,
        currency=order.currency,
    )
    session.add(invoice)
    issued = {"order_id": order.order_id, "number": invoice.number}
    add(session, Message("invoices.issued", issued, key=str(order.order_id)))


@consumer.handles("orders.cancelled")
def withdraw(session: Session, cancelled: Message) -> None:
    invoice = session.get(Invoice, UUID(cancelled.json()["order_id"]))
    if invoice is not None:
        session.delete(invoice)
