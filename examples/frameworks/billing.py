"""The work of each example: write an invoice in the transaction of the receipt."""

from sqlalchemy import Insert
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    """The application's own tables."""


class Invoice(Base):
    """One row for each order that was billed."""

    __tablename__ = "invoice"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int]


def invoice(order_id: int) -> Insert:
    """Bill an order."""
    return insert(Invoice).values(order_id=order_id)
