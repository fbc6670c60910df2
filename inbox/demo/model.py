"""The tables of the shop, of billing and of shipping."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import DateTime, MetaData, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """All tables are in the schema `pillarbox_demo`."""

    metadata = MetaData(schema="pillarbox_demo")


class Order(Base):
    """An order. `step` counts the customer's events from 1."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(index=True)
    step: Mapped[int]
    kind: Mapped[str]
    amount: Mapped[int]


class Outage(Base):
    """A customer whose invoices the ledger currently refuses."""

    __tablename__ = "outage"

    customer: Mapped[str] = mapped_column(primary_key=True)


class Handled(Base):
    """An effect of a handler: an invoice, a credit note, a parcel."""

    __tablename__ = "handled"

    id: Mapped[int] = mapped_column(primary_key=True)
    consumer: Mapped[str] = mapped_column(index=True)
    effect: Mapped[str]
    message_id: Mapped[UUID]
    customer: Mapped[str]
    step: Mapped[int]
    handled_at: Mapped[datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.clock_timestamp()
    )
