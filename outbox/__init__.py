"""Write messages in the same transaction as your business rows.

Start with `writer`, whose `add` puts messages into the caller's session. `message`
defines a message, `limits` its limits, `schema` its table and `lane` its place in the
order.

These modules need only SQLAlchemy. It is imported with the first use of `add` or
`insert_statement`, so that processes that don't write start faster and need less
memory. The subpackages serve the processes: `postgres`, `brokers`, `cloudevents`,
`dead_letters` and `observability` are the foundation of `relay` and `inbox`;
`administration` and `cli` are for their operators; `testing` is for tests.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from outbox.errors import (
    AutocommitError,
    BrokerTimeoutError,
    BrokerUnavailableError,
    CodecError,
    ConfigError,
    DatabaseUnavailableError,
    InvalidMessageError,
    MigrationError,
    MissingPartitionError,
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

if TYPE_CHECKING:
    from outbox.unsent import UnsentMessagesWarning
    from outbox.writer import add, insert_statement

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
    "MissingPartitionError",
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

_IMPORTED_WHEN_USED: Final = {
    "UnsentMessagesWarning": "outbox.unsent",
    "add": "outbox.writer",
    "insert_statement": "outbox.writer",
}


def __getattr__(name: str) -> Any:
    """Import what needs SQLAlchemy when it is first used."""
    if name not in _IMPORTED_WHEN_USED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_IMPORTED_WHEN_USED[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})
