"""The write side of pillarbox: messages in the caller's own transaction.

`message` is the value, `add` puts it into a session, `limits` says what it may
be, `schema` is its table and `lane` its place in the order. `lease`, `doorbell`,
`events`, `retry` and `statement` are the kernel that `relay` and `inbox` share.
"""

from outbox.add import add, insert_statement
from outbox.errors import (
    AutocommitError,
    CodecError,
    ConfigError,
    InvalidMessageError,
    NotASessionError,
    OutboxError,
)
from outbox.lane import Priority
from outbox.limits import Limits
from outbox.message import Message
from outbox.message_id import uuid7
from outbox.schema_registry import REGISTRY, SchemaRegistry
from outbox.unsent import UnsentMessagesWarning

__all__ = [
    "REGISTRY",
    "AutocommitError",
    "CodecError",
    "ConfigError",
    "InvalidMessageError",
    "Limits",
    "Message",
    "NotASessionError",
    "OutboxError",
    "Priority",
    "SchemaRegistry",
    "UnsentMessagesWarning",
    "add",
    "insert_statement",
    "uuid7",
]
