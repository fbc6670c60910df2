"""Write messages in the same transaction as your business rows.

Read `add` first: it puts messages into the caller's session. `message` is the value,
`limits` says what it may be, `schema` is its table, `lane` its place in the order.

These modules need SQLAlchemy and nothing else. The packages beside them serve the
processes: `postgres`, `brokers`, `cloudevents`, `dead_letters` and `observability`
are the foundation of `relay` and `inbox`; `administration` and `cli` are for their
operators; `testing` is for tests.
"""

from outbox.add import add, insert_statement
from outbox.errors import (
    AutocommitError,
    BrokerTimeoutError,
    BrokerUnavailableError,
    CodecError,
    ConfigError,
    DatabaseUnavailableError,
    InvalidMessageError,
    MigrationError,
    NotASessionError,
    OutboxError,
    PoolerError,
)
from outbox.events import Event, Observer
from outbox.lane import Priority
from outbox.limits import Limits
from outbox.message import Message
from outbox.message_id import uuid7
from outbox.payload_codec import PayloadCodec
from outbox.retry import RetryPolicy
from outbox.schema_registry import REGISTRY, SchemaRegistry
from outbox.unsent import UnsentMessagesWarning

__all__ = [
    "REGISTRY",
    "AutocommitError",
    "BrokerTimeoutError",
    "BrokerUnavailableError",
    "CodecError",
    "ConfigError",
    "DatabaseUnavailableError",
    "Event",
    "InvalidMessageError",
    "Limits",
    "Message",
    "MigrationError",
    "NotASessionError",
    "Observer",
    "OutboxError",
    "PayloadCodec",
    "PoolerError",
    "Priority",
    "RetryPolicy",
    "SchemaRegistry",
    "UnsentMessagesWarning",
    "add",
    "insert_statement",
    "uuid7",
]
