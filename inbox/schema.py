"""SQLAlchemy's view of the inbox's tables; the migrations create them.

The queue of the postgres broker is not included: only its own source and publisher use
it, through SQL files.
"""

from datetime import datetime

from sqlalchemy import (
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

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

dead_letter_table = Table(
    "dead_letter",
    metadata,
    Column(
        "id",
        UUID(as_uuid=True),
        primary_key=True,
        server_default=text("gen_random_uuid()"),
    ),
    _moment("created_at", primary_key=True),
    _moment("updated_at"),
    Column("status", Text, nullable=False, server_default=text("'PENDING'")),
    Column("retry_count", Integer, nullable=False, server_default=text("0")),
    Column("retry_after", DateTime(timezone=True), server_default=text("now()")),
    Column("origin", Text, nullable=False),
    Column("message_id", Text, nullable=False),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("tenant", Text),
    Column("attempts", Integer, nullable=False),
    Column("schema_version", Integer, nullable=False),
    Column("content_type", Text, nullable=False),
    Column("headers", JSONB, nullable=False),
    Column("payload", LargeBinary, nullable=False),
    Column("error_reason", Text, nullable=False),
    Column("error_stacktrace", Text),
    Column("discard_reason", Text),
    Column("discarded_by", Text),
    postgresql_partition_by="RANGE (created_at)",
)
