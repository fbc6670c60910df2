"""The rows of each writer: an order, whose reference is checked at the commit."""

from sqlalchemy import UniqueConstraint
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

UNIQUE_VIOLATION = "23505"


class Base(DeclarativeBase):
    """The application's own tables."""


class Order(Base):
    """One row for each order. Its constraint is deferred, so that commits can fail."""

    __tablename__ = "purchase"
    __table_args__ = (
        UniqueConstraint("reference", deferrable=True, initially="DEFERRED"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    reference: Mapped[str]


def is_duplicate(error: IntegrityError) -> bool:
    """Return whether the order existed already, and nothing else is wrong."""
    return getattr(error.orig, "sqlstate", None) == UNIQUE_VIOLATION
