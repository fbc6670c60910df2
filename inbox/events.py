"""The events that a consumer reports to its observers."""

import logging
from dataclasses import dataclass, field
from datetime import timedelta
from uuid import UUID

from outbox.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStarted(Event):
    """The consumer reached the database and the broker.

    Attributes:
        topics: that have a handler.
    """

    consumer: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStopped(Event):
    """Nothing is in flight any more.

    Attributes:
        returned: messages that were given back to the broker.
    """

    consumer: str
    returned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerActive(Event):
    """What the consumer has done since it last reported it, at intervals.

    An interval in which nothing happened isn't reported, but the 60th in a row is.

    Attributes:
        failed: how often a handler raised, and will be called again.
        retried: retries that were scheduled, after a failure or as a handler asked.
        lag: the median time from add to handled, in seconds; None if nothing was
            handled. It shows how far the consumer is behind. A scheduled message
            counts from when it was added.
        slowest: the longest such time.
        in_flight: handlers that are running now.
        held: messages that were fetched and are not settled yet, those in flight
            included.
        period: the time since the last report.
    """

    consumer: str
    handled: int
    failed: int
    duplicates: int
    retried: int
    dead_lettered: int
    lag: float | None
    slowest: float | None
    in_flight: int
    held: int
    period: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerMeasured(Event):
    """What the consumer holds, every few seconds.

    Attributes:
        in_flight: handlers that are running.
        held: messages that were fetched and are not settled yet, those in flight
            included.
    """

    level = logging.DEBUG

    consumer: str
    in_flight: int
    held: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesReceived(Event):
    """The broker delivered messages.

    Attributes:
        messages: how many.
    """

    level = logging.DEBUG

    consumer: str
    queue: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveriesReclaimed(Event):
    """The broker delivered messages that another replica had before.

    Attributes:
        messages: how many.
    """

    consumer: str
    queue: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryEvent(Event):
    """Something that happened to one delivery.

    Attributes:
        traceparent: the message's header of that name.
    """

    consumer: str
    id: UUID
    topic: str
    key: str | None
    traceparent: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHandled(DeliveryEvent):
    """The handler's effects and the receipt are committed.

    Attributes:
        seconds: how long that took.
        published_at: when the message was published, in seconds since 1970; None if
            the broker doesn't say.
    """

    level = logging.DEBUG

    seconds: float
    published_at: float | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateSkipped(DeliveryEvent):
    """The message has a receipt, so it was handled before; it was acked."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCancelled(DeliveryEvent):
    """Somebody cancelled the message's job; what it committed before remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailed(DeliveryEvent):
    """The handler raised; its work was rolled back, and it will be called again.

    Attributes:
        attempts: how often it has failed.
        reason: the error.
        stacktrace: of the message's first failure in this process; else None.
    """

    settles = "retry"
    about = ("consumer", "topic", "reason")

    attempts: int
    reason: str
    seconds_until_retry: float
    stacktrace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequested(DeliveryEvent):
    """The handler raised `RetryLater`.

    Attributes:
        reason: the one that the handler gave.
        seconds_until_retry: the delay.
    """

    settles = "postpone"
    level = logging.DEBUG

    reason: str
    seconds_until_retry: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeadLettered(DeliveryEvent):
    """The message is now in `inbox.dead_letter`.

    Attributes:
        attempts: how often it was tried.
        reason: why it was given up.
        stacktrace: that of the dead letter; None if an earlier event had it.
    """

    settles = "dead_letter"
    level = logging.WARNING
    about = ("consumer", "topic", "reason")
    advice = "fix the cause, then run pillarbox dead-letters retry --side inbox"

    attempts: int
    reason: str
    stacktrace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRepeated(DeliveryEvent):
    """The message was to be dead-lettered, and already has a PENDING dead letter."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReturned(DeliveryEvent):
    """The consumer stopped before the message was handled, and gave it back."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlersAbandoned(Event):
    """The process ended although handlers were still running, in threads.

    The server rolls back their transactions, and their messages are handled again.

    Attributes:
        handlers: how many there were.
    """

    level = logging.WARNING
    advice = "let the handlers end sooner, or give the Consumer a longer drain"

    consumer: str
    handlers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLost(Event):
    """The broker is unavailable; the consumer asks again after the delay.

    Attributes:
        reason: the error.
        seconds: the delay.
    """

    about = ("consumer", "queue")
    lasting_level = logging.WARNING
    advice = (
        "check that the broker is running, that this host can reach it, and that it"
        " accepts the credentials of the consumer's URL"
    )

    consumer: str
    queue: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecovered(Event):
    """The broker delivers messages again."""

    ends = (SourceLost,)

    consumer: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLanesWithheld(Event):
    """Sessions that are no consumers hold lanes of a queue over the postgres broker.

    The keys of these lanes wait; those of the other lanes are handled. If no lane is
    left, the queue's source is lost.

    Attributes:
        holders: these sessions, with process id, role and application.
        remedy: how to end them.
    """

    level = logging.WARNING
    waits_for = "lanes"

    consumer: str
    queue: str
    holders: tuple[str, ...]
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLanesFree(Event):
    """No other session keeps this consumer from leasing its lanes any more."""

    consumer: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerDatabaseLost(Event):
    """The handlers' database is unavailable; the consumer tries again after the delay.

    While that lasts the event is repeated.

    Attributes:
        reason: the error.
        seconds: the delay.
    """

    about = ("consumer",)
    lasting_level = logging.WARNING
    advice = (
        "check that the database is running, that this host can reach it, and that it"
        " has a connection left"
    )
    waits_for = "database"

    consumer: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerDatabaseRecovered(Event):
    """The handlers' database is back."""

    ends = (HandlerDatabaseLost,)

    consumer: str
