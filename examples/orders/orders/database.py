"""The tables, and the sessions of the application and its consumer."""

import os
from decimal import Decimal
from uuid import UUID

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

DATABASE = os.environ.get("PILLARBOX_DATABASE_URL", "postgresql+psycopg:///orders")
BROKER = os.environ.get("PILLARBOX_BROKER_URL", DATABASE)

sessions = async_sessionmaker(create_async_engine(DATABASE))


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str]
    amount: Mapped[Decimal]


class Invoice(Base):
    __tablename__ = "invoices"

    order_id: Mapped[UUID] = mapped_column(primary_key=True)
    surname: Mapped[str]
    amount: Mapped[Decimal]
