"""What a consumer tells its observers."""

import logging
from dataclasses import dataclass
from uuid import UUID

from outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStarted(Event):
    """The consumer reached the database and the broker."""

    consumer: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStopped(Event):
    """Nothing is in flight any more; `returned` messages were given back unhandled."""

    consumer: str
    returned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesReceived(Event):
    """The broker handed messages over."""

    level = logging.DEBUG

    consumer: str
    queue: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesReclaimed(Event):
    """Among what the broker handed over was what another replica had before."""

    consumer: str
    queue: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryEvent(Event):
    """Something that happened to one delivery."""

    consumer: str
    id: UUID
    topic: str
    key: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHandled(DeliveryEvent):
    """The handler's effects and the receipt are committed.

    A handler that is `@idempotent` itself is counted here for a duplicate too.
    """

    level = logging.DEBUG

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateSkipped(DeliveryEvent):
    """There was a receipt: the message was handled before, and acked now."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCancelled(DeliveryEvent):
    """Somebody cancelled the message's job; what it did before stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailed(DeliveryEvent):
    """The handler raised; nothing of it is left, and it is called again.

    `stacktrace` is as in a dead letter, of the message's first failure in this process.
    """

    level = logging.WARNING

    attempts: int
    reason: str
    seconds_until_retry: float
    stacktrace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequested(DeliveryEvent):
    """The handler raised `RetryLater`."""

    reason: str
    seconds_until_retry: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeadLettered(DeliveryEvent):
    """The message was given up; it is in `inbox.dead_letter`.

    `stacktrace` is that of the dead letter, unless the message's was told before.
    """

    level = logging.ERROR

    attempts: int
    reason: str
    stacktrace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRepeated(DeliveryEvent):
    """The message was given up, and a dead letter of it is PENDING already."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReturned(DeliveryEvent):
    """The consumer stopped before the message was handled, and gave it back."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLost(Event):
    """The broker is away; it is asked again after the delay."""

    level = logging.WARNING

    consumer: str
    queue: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFound(Event):
    """The broker hands messages over again."""

    consumer: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerDatabaseLost(Event):
    """The handlers' database is away; it is tried again after the delay."""

    level = logging.WARNING
    waits_for = "database"

    consumer: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerDatabaseFound(Event):
    """The handlers' database is back."""

    consumer: str
