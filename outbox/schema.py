"""The outbox's table as SQLAlchemy sees it; the migrations create it."""

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB, UUID

metadata = MetaData(schema="outbox")

message_table = Table(
    "message",
    metadata,
    Column("id", UUID(as_uuid=True), primary_key=True),
    Column(
        "created_at",
        DateTime(timezone=True),
        primary_key=True,
        server_default=text("clock_timestamp()"),
    ),
    Column(
        "seq",
        BigInteger,
        nullable=False,
        server_default=text(
            "CASE WHEN pg_current_xact_id() IS NOT NULL"
            " THEN nextval('outbox.message_seq'::regclass) END"
        ),
    ),
    Column("available_at", DateTime(timezone=True)),
    Column("lane", SmallInteger, nullable=False),
    Column("schema_version", Integer, nullable=False, server_default=text("1")),
    Column("topic", Text, nullable=False),
    Column("key", Text),
    Column("tenant", Text),
    Column("content_type", Text, nullable=False),
    Column("headers", JSONB, nullable=False, server_default=text("'{}'::jsonb")),
    Column("payload", LargeBinary, nullable=False),
    postgresql_partition_by="RANGE (created_at)",
)
