"""The events that a consumer reports to its observers."""

import logging
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self
from uuid import UUID

from pillarbox.outbox.events import Event, ProcessFailed, StartDelayed
from pillarbox.outbox.message import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStopped(Event):
    """The consumer stopped, and nothing is in flight.

    Attributes:
        returned: messages that were returned to the broker.
    """

    waits_for = "restart"

    consumer: str
    returned: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStarted(Event):
    """The consumer connected to the database and the broker.

    Attributes:
        topics: the topics for which it has a handler.
    """

    ends = (ConsumerStopped, ProcessFailed, StartDelayed)

    consumer: str
    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerActive(Event):
    """What the consumer did since the last such report, at regular intervals.

    Intervals without activity aren't reported, except for every 60th in a row.

    Attributes:
        failed: how often a handler raised and will be called again.
        retried: retries that were scheduled, after a failure or on a handler's request.
        lag: the median time from add to handled, in seconds; None if nothing was
            handled. It shows how far the consumer is behind. For a scheduled message
            the time starts when it was due, or, over a broker, when it was added.
        slowest: the longest such time.
        in_flight: the number of running handlers.
        held: messages that were fetched and are not settled yet, including those in
            flight.
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
class DeliveriesReceived(Event):
    """The broker delivered messages.

    Attributes:
        messages: the number of messages.
    """

    level = logging.DEBUG

    consumer: str
    queue: str
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryEvent(Event):
    """Something that happened to one delivery.

    Attributes:
        traceparent: the value of the message's `traceparent` header.
    """

    consumer: str
    id: UUID
    topic: str
    key: str | None
    traceparent: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, consumer: str, message: Message, **more: Any) -> Self:
        """Return the event about a message, with the fields of its kind."""
        return cls(
            consumer=consumer,
            id=message.id,
            topic=message.topic,
            key=message.key,
            traceparent=message.headers.get("traceparent"),
            **more,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageHandled(DeliveryEvent):
    """The handler's effects and the receipt were committed.

    Attributes:
        seconds: how long handling took.
        published_at: when the message was published, in seconds since 1970; None if the
            broker doesn't say.
        due_at: when it was added or, if no broker carried it, the time it was scheduled
            for; None if unknown.
    """

    level = logging.DEBUG

    seconds: float
    published_at: float | None = field(default=None, repr=False)
    due_at: float | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateSkipped(DeliveryEvent):
    """The message has a receipt, so it was already handled; it was only acked."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCancelled(DeliveryEvent):
    """The message's job was cancelled; anything it had committed remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFailed(DeliveryEvent):
    """The handler raised; its work was rolled back, and it will be called again.

    Attributes:
        attempts: the number of failed attempts.
        reason: the error.
        stacktrace: given for the message's first failure in this process; else None.
    """

    settles = "retry"
    about = ("consumer", "topic", "reason")

    attempts: int
    reason: str
    seconds_until_retry: float
    stacktrace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJobFailed(DeliveryEvent):
    """A long handler raised after `job.finish()`; the message counts as handled.

    Attributes:
        reason: the error.
        stacktrace: where it was raised.
    """

    level = logging.WARNING
    about = ("consumer", "topic", "reason")
    advice = "do all work before job.finish() ends, then return"

    reason: str
    stacktrace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequested(DeliveryEvent):
    """The handler raised `RetryLater`.

    Attributes:
        reason: the reason that the handler gave.
        seconds_until_retry: the delay.
    """

    settles = "postpone"
    level = logging.DEBUG

    reason: str
    seconds_until_retry: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageDeadLettered(DeliveryEvent):
    """The message was stored in `inbox.dead_letter`.

    Attributes:
        attempts: the number of attempts.
        reason: why the message was dead-lettered.
        stacktrace: the stack trace of the failure; None if an earlier event had it.
    """

    settles = "dead_letter"
    level = logging.WARNING
    about = ("consumer", "topic", "reason")
    advice = (
        "fix the cause, then run pillarbox dead-letters retry --consumer MODULE:NAME"
        " ID, with the id above"
    )

    attempts: int
    reason: str
    stacktrace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterRepeated(DeliveryEvent):
    """The message was not dead-lettered again: it already has a PENDING dead letter."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryReturned(DeliveryEvent):
    """The consumer returned a message: it stops, or has no handler or codec for it."""

    level = logging.DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerMissing(Event):
    """The replica got the first message of a topic for which it has no handler.

    It hands the topic's messages back, so that a replica with a newer release gets
    them; after `rollout` it dead-letters them.

    Attributes:
        reason: whether a handler is missing, or one for the schema version.
        seconds: how long they are handed back.
    """

    level = logging.WARNING
    about = ("consumer", "topic")
    advice = (
        "during a deploy, wait; if no release handles the topic any more, end the"
        " subscription (see the broker's page; for postgres, pillarbox readers drop)"
    )

    consumer: str
    topic: str
    reason: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecMissing(Event):
    """The consumer got the first encoded message of a topic, and has no codec.

    It hands such messages back until it is restarted with a codec, and dead-letters
    none of them.

    Attributes:
        reason: the codec that encoded the message.
    """

    level = logging.WARNING
    about = ("consumer", "topic")
    advice = (
        "restart the consumer with Consumer(…, codec=…); the messages wait until then"
    )

    consumer: str
    topic: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceWarned(Event):
    """Something about the consumer's group at the broker may be a mistake."""

    level = logging.WARNING
    about = ("consumer", "queue", "reason")
    advice = (
        "if this isn't intended, stop the consumer, and give it its former name or a"
        " unique one"
    )

    consumer: str
    queue: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingBy(Event):
    """Another replica receives some topics, so this one receives nothing from them.

    That keeps the messages of a key in order. When the other one stops or dies, this
    one takes over.

    Attributes:
        topics: all topics for which it stands by now.
        alternatives: how several replicas can work at a time.
    """

    about = ("consumer", "queue", "topics")

    consumer: str
    queue: str
    topics: tuple[str, ...]
    alternatives: str = (
        "if one replica is too slow, run several at once: with shards, if the broker"
        ' supports them, or without order per key: Consumer(order="none")'
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyEnded(Event):
    """The replica no longer stands by for any topic."""

    ends = (StandingBy,)

    consumer: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlersAbandoned(Event):
    """The consumer stopped while handlers were still running in threads.

    A thread can't be stopped, and Python waits for it before a process ends; `pillarbox
    consume` exits at once. Their messages are handled again.

    Attributes:
        handlers: the number of these handlers.
    """

    level = logging.WARNING
    advice = "make the handlers faster, or give the Consumer a longer drain"

    consumer: str
    handlers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLost(Event):
    """The broker is unavailable; the consumer tries again after the delay.

    Attributes:
        reason: the error.
        seconds: the delay.
    """

    about = ("consumer", "queue")
    lasting_level = logging.WARNING
    waits_for = "source"
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
    """The broker is available again."""

    ends = (SourceLost,)

    consumer: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryLanesWithheld(Event):
    """Sessions other than consumers hold lanes of a queue on the postgres broker.

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
    """No foreign session keeps this consumer from leasing its lanes any longer."""

    ends = (DeliveryLanesWithheld,)

    consumer: str
    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerOverdue(DeliveryEvent):
    """A handler is still running after its limit; its message's key waits for it.

    The limit is `max_idle`, after which the server has ended an idle transaction, or
    the handler's `time_limit` if that is longer. A job has only its `time_limit`.

    Attributes:
        id: the message; of a batch, the first one.
    """

    level = logging.WARNING
    about = ("consumer", "handler")
    advice = (
        "find out where it hangs, for example with py-spy dump; set a timeout for its"
        " calls to other services, or a time_limit if the handler may take longer"
    )

    handler: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerDatabaseLost(Event):
    """The handlers' database is unavailable; the consumer tries again after the delay.

    The event is repeated during a long outage.

    Attributes:
        reason: the error.
        remedy: what to do, chosen by the error's SQLSTATE.
        seconds: the delay.
    """

    about = ("consumer",)
    lasting_level = logging.WARNING
    waits_for = "database"

    consumer: str
    reason: str
    remedy: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerDatabaseRecovered(Event):
    """The handlers' database is available again."""

    ends = (HandlerDatabaseLost,)

    consumer: str
