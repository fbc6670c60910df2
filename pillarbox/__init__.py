"""The transactional outbox and inbox: what applications import.

    from pillarbox import Consumer, Message, Relay, add, guard, idempotent

Each name is imported from its module when it is first used, so `add` doesn't load the
consumer. The packages `outbox`, `inbox` and `relay` hold everything else, such as the
contracts of adapters and `inbox.events`.

Raises:
    ImportError: a package of the application hides one of those. All three must be
        pillarbox's own.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from inbox.consumer import Consumer
    from inbox.errors import (
        DeadLetter,
        HandlerTransactionError,
        RetryLater,
    )
    from inbox.guard import guard
    from inbox.idempotent import idempotent, message_id
    from inbox.jobs.job import AsyncJob, Job
    from inbox.receipt import record_receipt
    from inbox.source import Delivery, Source
    from outbox.cancellation import Cancelled, TooLate, UnknownMessage, cancel
    from outbox.errors import (
        BrokerUnavailableError,
        ConfigError,
        DatabaseUnavailableError,
        InvalidMessageError,
        OutboxError,
    )
    from outbox.events import Event
    from outbox.message import Message
    from outbox.message_id import uuid7
    from outbox.payload.jsonable import jsonable
    from outbox.payload.payload_codec import PayloadCodec
    from outbox.payload.schema_registry import REGISTRY, SchemaRegistry, event
    from outbox.retry import RetryPolicy
    from outbox.unsent import UnsentMessagesWarning
    from outbox.writer import add, insert_statement
    from relay.config import RelayConfig
    from relay.publisher import Acked, Nacked, Publisher
    from relay.relay import Relay

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
    "HandlerTransactionError",
    "InvalidMessageError",
    "Job",
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
    "add",
    "cancel",
    "event",
    "guard",
    "idempotent",
    "insert_statement",
    "jsonable",
    "message_id",
    "record_receipt",
    "uuid7",
]

_MODULES: Final = {
    "REGISTRY": "outbox.payload.schema_registry",
    "Acked": "relay.publisher",
    "AsyncJob": "inbox.jobs.job",
    "BrokerUnavailableError": "outbox.errors",
    "Cancelled": "outbox.cancellation",
    "ConfigError": "outbox.errors",
    "Consumer": "inbox.consumer",
    "DatabaseUnavailableError": "outbox.errors",
    "DeadLetter": "inbox.errors",
    "Delivery": "inbox.source",
    "Event": "outbox.events",
    "HandlerTransactionError": "inbox.errors",
    "InvalidMessageError": "outbox.errors",
    "Job": "inbox.jobs.job",
    "Message": "outbox.message",
    "Nacked": "relay.publisher",
    "OutboxError": "outbox.errors",
    "PayloadCodec": "outbox.payload.payload_codec",
    "Publisher": "relay.publisher",
    "Relay": "relay.relay",
    "RelayConfig": "relay.config",
    "RetryLater": "inbox.errors",
    "RetryPolicy": "outbox.retry",
    "SchemaRegistry": "outbox.payload.schema_registry",
    "Source": "inbox.source",
    "TooLate": "outbox.cancellation",
    "UnknownMessage": "outbox.cancellation",
    "UnsentMessagesWarning": "outbox.unsent",
    "add": "outbox.writer",
    "cancel": "outbox.cancellation",
    "event": "outbox.payload.schema_registry",
    "guard": "inbox.guard",
    "idempotent": "inbox.idempotent",
    "insert_statement": "outbox.writer",
    "jsonable": "outbox.payload.jsonable",
    "message_id": "inbox.idempotent",
    "record_receipt": "inbox.receipt",
    "uuid7": "outbox.message_id",
}

_PACKAGES: Final = ("outbox", "relay", "inbox")
_FAILED: Final = 2


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
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
    from outbox.cli.main import main as run

    return run()


def _hidden() -> Iterator[tuple[str, Path, Path]]:
    """Yield each package of ours that another one hides, with its path and ours."""
    for name in _PACKAGES:
        ours = Path(__file__).resolve().parent.parent / name
        spec = find_spec(name)
        if spec is None or spec.origin is None or not ours.is_dir():
            continue
        origin = Path(spec.origin).resolve()
        theirs = origin.parent if origin.name == "__init__.py" else origin
        if theirs != ours:
            yield name, theirs, ours


for _name, _theirs, _ours in _hidden():
    raise ImportError(
        f"the package {_name!r} at {_theirs} hides pillarbox's own at {_ours}: rename "
        f"it, or take {_theirs.parent} from PYTHONPATH"
    )
