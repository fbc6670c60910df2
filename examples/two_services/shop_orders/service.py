"""Place and cancel orders, and note their invoices.

python -m shop_orders.service place CUSTOMER AMOUNT
python -m shop_orders.service cancel ID
"""

import os
import sys
from decimal import Decimal
from uuid import UUID, uuid4

from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pillarbox import Consumer, DeadLetter, Message, add, event, sqlalchemy_url

DATABASE = os.environ.get("PILLARBOX_DATABASE_URL", "postgresql:///orders")
BROKER = os.environ.get("PILLARBOX_BROKER_URL", "redis://127.0.0.1")

sessions = sessionmaker(create_engine(sqlalchemy_url(DATABASE)))
consumer = Consumer(BROKER, sessions, name="orders")


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[Decimal]
    invoice: Mapped[str | None]


@event("orders.placed", version=2)
class OrderPlaced(BaseModel):
    order_id: UUID
    customer: str
    amount: Decimal
    currency: str


def place(session: Session, customer: str, amount: Decimal) -> UUID:
    order = Order(id=uuid4(), customer=customer, amount=amount)
    session.add(order)
    placed = OrderPlaced(
        order_id=order.id, customer=customer, amount=amount, currency="EUR"
    )
    add(session, placed, key=str(order.id))
    return order.id


def cancel(session: Session, id: UUID) -> None:
    session.delete(session.get_one(Order, id))
    add(session, Message("orders.cancelled", {"order_id": id}, key=str(id)))


@consumer.handles("invoices.issued")
def note(session: Session, issued: Message) -> None:
    order = session.get(Order, UUID(issued.json()["order_id"]))
    if order is None:
        raise DeadLetter(f"no order {issued.json()['order_id']}")
    order.invoice = issued.json()["number"]


if __name__ == "__main__":
    with sessions.begin() as transaction:
        match sys.argv[1:]:
            case "place", customer, amount:
                print(place(transaction, customer, Decimal(amount)))
            case "cancel", id:
                cancel(transaction, UUID(id))
