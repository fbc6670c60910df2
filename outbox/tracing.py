"""The cause of a message: the message that was handled, and the trace it belongs to.

The inbox notes the cause when it records a receipt, and `add` writes it into a header
of every message of the same transaction.

`pillarbox.outbox.observability.opentelemetry.instrument` sets `tracer`. Code that adds,
publishes or handles a message checks it, and does nothing more if it is None.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from uuid import UUID

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

    from pillarbox.outbox.events import Event
    from pillarbox.outbox.message import Message

CAUSE: Final = "causation-id"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
_CAUSE: Final = "outbox.cause"
_CONNECTION: Final[ContextVar[tuple[object, UUID] | None]] = ContextVar(
    "outbox.cause", default=None
)


def set_cause(session: "Session", id: UUID) -> None:
    """Record which message a session's transaction handles, until it ends."""
    session.info[_CAUSE] = (_root(session), id)


def cause_of(session: "Session") -> UUID | None:
    """Return the id of the message that a session's transaction handles, if known."""
    cause: tuple[Any, UUID] | None = session.info.get(_CAUSE)
    if cause is None:
        return None
    if cause[0] is _root(session):
        return cause[1]
    del session.info[_CAUSE]
    return None


@contextmanager
def causing(connection: object, id: UUID) -> Iterator[None]:
    """Let messages that the block adds on a driver's connection have this cause."""
    token = _CONNECTION.set((connection, id))
    try:
        yield
    finally:
        _CONNECTION.reset(token)


def cause_on(connection: object) -> UUID | None:
    """Return the id of the message that its transaction handles, if known."""
    cause = _CONNECTION.get()
    return cause[1] if cause is not None and cause[0] is connection else None


def caused(message: "Message", cause: UUID) -> "Message":
    """Return the message with its cause in a header, unless it has one already."""
    if CAUSE in message.headers:
        return message
    return message.replace(headers={**message.headers, CAUSE: str(cause)})


def _root(session: "Session") -> "SessionTransaction | None":
    return session.get_transaction()


class Traced(Protocol):
    """The subject of a span: a message, or the known part of one."""

    @property
    def id(self) -> Any:
        """Its id, of any type."""

    @property
    def topic(self) -> str | None:
        """Its topic, if known."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Its headers, with the trace context in which it was added."""


class Received(NamedTuple):
    """A message of which only these fields are known."""

    id: Any
    topic: str | None
    headers: Mapping[str, str]


class Sending(Protocol):
    """The span of one call of a publisher."""

    def refused(self, reasons: Sequence[str]) -> None:
        """Record that the broker refused messages, with the reason for each."""


class Processing(Protocol):
    """The span of one call of a handler."""

    def skipped(self) -> None:
        """Record that the messages were duplicates."""

    def failed(self, error: BaseException) -> None:
        """Record an error that doesn't leave the block."""


class Tracer(Protocol):
    """Creates the spans. No method raises an error of its own; safe in any thread."""

    def create(self, messages: tuple["Message", ...]) -> tuple["Message", ...]:
        """Return messages that are being added, each with a trace context."""

    def send(
        self, messages: Sequence["Message"], system: str
    ) -> AbstractContextManager[Sending]:
        """Trace the publishing of a batch to a broker."""

    def process(
        self,
        messages: Sequence[Traced],
        consumer: str,
        *,
        system: str | None = None,
        is_decision: Callable[[Exception], bool] = lambda _: False,
    ) -> AbstractContextManager[Processing]:
        """Trace the handling of messages; their span is the current one.

        Inside the block, the same consumer's handling of the same messages creates no
        further span.

        Args:
            system: the broker, unless `receive` has named it.
            is_decision: recognizes exceptions that aren't errors when they leave the
                block.
        """

    def receive(self, system: str) -> None:
        """Record the broker of this task's messages, and leave any other trace."""

    def observe(self, event: "Event") -> None:
        """Create the span of an event that settles a message."""


tracer: Tracer | None = None
"""Creates the spans of this process; None if it isn't traced."""


def system_of(adapter: object) -> str:
    """Return the broker of a publisher or source, for `messaging.system`."""
    named = getattr(adapter, "messaging_system", None)
    if isinstance(named, str):
        return named
    name = type(adapter).__name__
    return (name.removesuffix("Publisher").removesuffix("Source") or name).lower()
