"""SQLAlchemy's view of the tables of receipts; the migrations create them.

All other statements on the inbox's tables are SQL files.
"""

from datetime import datetime

from sqlalchemy import (
    Column,
    DateTime,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import UUID

metadata = MetaData(schema="inbox")


def _moment(name: str, *, primary_key: bool = False) -> Column[datetime]:
    return Column(
        name,
        DateTime(timezone=True),
        primary_key=primary_key,
        nullable=False,
        server_default=text("now()"),
    )


receipt_table = Table(
    "receipt",
    metadata,
    Column("message_id", UUID(as_uuid=True), primary_key=True),
    Column("message_at", DateTime(timezone=True), primary_key=True),
    _moment("received_at"),
    Column("consumer", Text, primary_key=True),
    postgresql_partition_by="RANGE (message_at)",
)

foreign_receipt_table = Table(
    "foreign_receipt",
    metadata,
    Column("source", Text, primary_key=True),
    Column("message_id", Text, primary_key=True),
    Column("consumer", Text, primary_key=True),
    _moment("received_at"),
)
