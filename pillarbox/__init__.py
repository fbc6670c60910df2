"""The transactional outbox and inbox: what applications import.

    from pillarbox import Consumer, Message, Relay, add, guard, idempotent

Each name is imported from its module when it is first used, so `add` doesn't load the
consumer. The packages `pillarbox.outbox`, `pillarbox.inbox` and `pillarbox.relay` hold
everything else, such as the contracts of adapters and `pillarbox.inbox.events`. In the
repository, they are links to the folders at its top.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pillarbox.inbox.consumer import Consumer
    from pillarbox.inbox.errors import (
        DeadLetter,
        HandlerTransactionError,
        RetryLater,
    )
    from pillarbox.inbox.guard import guard
    from pillarbox.inbox.idempotent import idempotent, message_id
    from pillarbox.inbox.jobs.job import AsyncJob, Job
    from pillarbox.inbox.receipt import ForeignId, record_receipt
    from pillarbox.inbox.source import Delivery, Source
    from pillarbox.inbox.webhook.app import WebhookApp
    from pillarbox.outbox.administration.autogenerate import LeaveOut
    from pillarbox.outbox.cancellation import Cancelled, TooLate, UnknownMessage, cancel
    from pillarbox.outbox.errors import (
        BrokerUnavailableError,
        ConfigError,
        DatabaseUnavailableError,
        InvalidMessageError,
        OutboxError,
    )
    from pillarbox.outbox.events import Event
    from pillarbox.outbox.message import Message
    from pillarbox.outbox.message_id import uuid7
    from pillarbox.outbox.observability.opentelemetry import instrument
    from pillarbox.outbox.payload.jsonable import jsonable
    from pillarbox.outbox.payload.payload_codec import PayloadCodec
    from pillarbox.outbox.payload.schema_registry import REGISTRY, SchemaRegistry, event
    from pillarbox.outbox.postgres.connection import conninfo, sqlalchemy_url
    from pillarbox.outbox.retry import RetryPolicy
    from pillarbox.outbox.unsent import UnsentMessagesWarning
    from pillarbox.outbox.writer import add, insert_statement
    from pillarbox.relay.config import RelayConfig
    from pillarbox.relay.publisher import Acked, Nacked, Publisher
    from pillarbox.relay.relay import Relay

__all__ = [
    "REGISTRY",
    "Acked",
    "AsyncJob",
    "BrokerUnavailableError",
    "Cancelled",
    "ConfigError",
    "Consumer",
    "DatabaseUnavailableError",
    "DeadLetter",
    "Delivery",
    "Event",
    "ForeignId",
    "HandlerTransactionError",
    "InvalidMessageError",
    "Job",
    "LeaveOut",
    "Message",
    "Nacked",
    "OutboxError",
    "PayloadCodec",
    "Publisher",
    "Relay",
    "RelayConfig",
    "RetryLater",
    "RetryPolicy",
    "SchemaRegistry",
    "Source",
    "TooLate",
    "UnknownMessage",
    "UnsentMessagesWarning",
    "WebhookApp",
    "add",
    "cancel",
    "conninfo",
    "event",
    "guard",
    "idempotent",
    "insert_statement",
    "instrument",
    "jsonable",
    "message_id",
    "record_receipt",
    "sqlalchemy_url",
    "uuid7",
]

_NAMES: Final = {
    "inbox.consumer": "Consumer",
    "inbox.errors": "DeadLetter HandlerTransactionError RetryLater",
    "inbox.guard": "guard",
    "inbox.idempotent": "idempotent message_id",
    "inbox.jobs.job": "AsyncJob Job",
    "inbox.receipt": "ForeignId record_receipt",
    "inbox.source": "Delivery Source",
    "inbox.webhook.app": "WebhookApp",
    "outbox.administration.autogenerate": "LeaveOut",
    "outbox.cancellation": "Cancelled TooLate UnknownMessage cancel",
    "outbox.errors": "BrokerUnavailableError ConfigError DatabaseUnavailableError "
    "InvalidMessageError OutboxError",
    "outbox.events": "Event",
    "outbox.message": "Message",
    "outbox.message_id": "uuid7",
    "outbox.observability.opentelemetry": "instrument",
    "outbox.payload.jsonable": "jsonable",
    "outbox.payload.payload_codec": "PayloadCodec",
    "outbox.payload.schema_registry": "REGISTRY SchemaRegistry event",
    "outbox.postgres.connection": "conninfo sqlalchemy_url",
    "outbox.retry": "RetryPolicy",
    "outbox.unsent": "UnsentMessagesWarning",
    "outbox.writer": "add insert_statement",
    "relay.config": "RelayConfig",
    "relay.publisher": "Acked Nacked Publisher",
    "relay.relay": "Relay",
}
"""The names of each module, without its `pillarbox.`."""
_MODULES: Final = {name: it for it, names in _NAMES.items() for name in names.split()}

_FAILED: Final = 2


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"pillarbox.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names, imported or not."""
    return sorted({*globals(), *__all__})


def main() -> int:
    """Run a command and return its exit status."""
    try:
        import typer as typer
    except ModuleNotFoundError as error:
        sys.stderr.write(
            f"pillarbox: the command line needs {error.name}: pip install "
            "'pillarbox[cli]'\n"
        )
        return _FAILED
    from pillarbox.outbox.cli.main import main as run

    return run()
