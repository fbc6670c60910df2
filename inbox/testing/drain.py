"""Deliver what an application has added to its own handlers, in a test.

    place_order(session)
    session.commit()
    drained = await drain(billing, sessions=sessions)
    assert drained.topics == ["orders.placed", "orders.billed"]

There is no relay, no broker and no waiting: committed messages go from the outbox to
the handlers, in the order in which they become due, and so do the messages that
handlers add. Receipts, transactions, retries and dead letters are as in production.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final, Self
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from pillarbox.inbox.connection import connection_of
from pillarbox.inbox.consumer import Consumer
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.handlers.pools import is_pool
from pillarbox.inbox.handlers.sessions import Sessions, check_joined, make_executor
from pillarbox.inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from pillarbox.inbox.source import Abilities, Arrived, Delivery, EntryDelivery
from pillarbox.outbox.errors import ConfigError, shorten
from pillarbox.outbox.events import Event
from pillarbox.outbox.lane import priority_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.postgres.sql_files import load

__all__ = ["DeadLettered", "Drained", "drain"]

_SOON: Final = 0.1
"""`drain` waits for retries that are due within this many seconds."""


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """A message that became a dead letter, and why."""

    message: Message
    reason: str


@dataclass(slots=True)
class Drained:
    """The outcomes of the delivered messages.

    Attributes:
        handled: the messages whose effects were committed, in order; a message that
            several consumers handled is listed several times.
        duplicates: messages that had been handled before.
        dead_lettered: messages that became dead letters.
        later: messages whose handler raised `RetryLater`, for the next `drain`.
    """

    handled: list[Message] = field(default_factory=list)
    duplicates: list[Message] = field(default_factory=list)
    dead_lettered: list[DeadLettered] = field(default_factory=list)
    later: list[Message] = field(default_factory=list)

    @property
    def topics(self) -> list[str]:
        """The topics of the handled messages."""
        return [message.topic for message in self.handled]


async def drain(
    *consumers: Consumer, sessions: Sessions, at: datetime | None = None
) -> Drained:
    """Deliver the outbox's messages to the handlers until nothing is left.

    Args:
        consumers: those of the application, as its modules define them; their own
            sources and sessions aren't used.
        sessions: the session factory of the test's database, which has the outbox and
            the inbox.
        at: deliver messages that are available by then (see `Message.available_at`).
            Default: now.

    Raises:
        ConfigError: `sessions` are for another kind of handlers, or join a transaction
            without a savepoint, `at` is naive, or a message is encoded and its consumer
            has no codec.
    """
    if is_pool(sessions) and sessions.closed:
        raise ConfigError(
            f"sessions {shorten(sessions)}: the pool isn't open; drain in its block"
        )
    if at is not None and at.tzinfo is None:
        raise ConfigError(
            f"at {shorten(at)}: is a naive datetime, which has no time zone; give it "
            "one: datetime.now(UTC) + …"
        )
    check_joined(sessions)
    drained = Drained()
    at = datetime.now(UTC) if at is None else at
    rounds = [_Draining(consumer, sessions, at, drained) for consumer in consumers]
    while True:
        did = [await each.run() for each in rounds]
        if not any(did):
            return drained


class _Draining:
    """Delivers to one consumer, in rounds.

    A round ends when all that is left waits for a retry.
    """

    def __init__(
        self, consumer: Consumer, sessions: Sessions, at: datetime, drained: Drained
    ) -> None:
        self.attempts: dict[UUID, int] = {}
        self._consumer = consumer
        self._sessions = sessions
        self._at = at
        self._drained = drained
        self._later: set[UUID] = set()
        self._messages: dict[UUID, Message] = {}
        self._left: set[UUID] = set()
        self._parked: set[UUID] = set()

    async def run(self) -> bool:
        """Deliver what is undelivered; return whether there was something."""
        executor = make_executor(self._sessions, self._consumer.name, 1)
        try:
            found = await executor.transact(self._find)
        finally:
            await executor.close()
        waiting: dict[str, list[Message]] = {}
        for message in found:
            queue = self._consumer.queue_of(message.topic)
            if queue is not None and message.id not in self._later:
                self._consumer.require_codec(message)
                waiting.setdefault(queue, []).append(message)
        if not waiting:
            return False
        queues = {self._consumer.queue_of(topic) for topic in self._consumer.topics}
        sources = {q: _Source(waiting.get(q, []), self) for q in queues if q}
        consumer = self._consumer.connected_to(sources, self._sessions)
        consumer.observe(self._on_event)
        self._stop = consumer.stop
        self._messages = {m.id: m for each in waiting.values() for m in each}
        self._left = {*self._messages}
        self._parked = set()
        await consumer.run()
        return True

    def settled(self, id: UUID) -> None:
        """Note that a message has its outcome, or was returned."""
        self._left.discard(id)
        self._stop_if_parked()

    def _find(self, session: Session) -> list[Message]:
        rows = connection_of(session).execute(
            text(load("inbox", "find_undelivered")),
            {"consumer": self._consumer.name, "at": self._at},
        )
        return [
            Message(
                payload=bytes(row.pop("payload")),
                priority=priority_of(row.pop("lane")),
                **row,
            )
            for row in (dict(row._mapping) for row in rows)
        ]

    def _on_event(self, event: Event) -> None:
        match event:
            case MessageHandled():
                self._drained.handled.append(self._messages[event.id])
            case DuplicateSkipped():
                self._drained.duplicates.append(self._messages[event.id])
            case MessageDeadLettered():
                letter = DeadLettered(self._messages[event.id], event.reason)
                self._drained.dead_lettered.append(letter)
            case RetryRequested():
                self._drained.later.append(self._messages[event.id])
                self._later.add(event.id)
                self._park(event.id)
            case HandlerFailed() if event.seconds_until_retry > _SOON:
                self._park(event.id)

    def _park(self, id: UUID) -> None:
        self._parked.add(id)
        self._stop_if_parked()

    def _stop_if_parked(self) -> None:
        if self._left <= self._parked:
            self._stop()


class _Source:
    """A source of messages that are known before."""

    def __init__(self, messages: Sequence[Message], draining: _Draining) -> None:
        self.abilities = Abilities()
        self._waiting = deque(messages)
        self._draining = draining

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        if not self._waiting:
            await asyncio.Event().wait()  # until the consumer stops
        count = min(limit, len(self._waiting))
        return [self._delivery(self._waiting.popleft()) for _ in range(count)]

    def _delivery(self, message: Message) -> Delivery:
        attempts = self._draining.attempts.get(message.id, 0)
        history = REDELIVERED if attempts else FIRST_DELIVERY
        arrived = Arrived(message=message, attempts=attempts, history=history)
        return EntryDelivery(self, message.id, arrived)

    def acked(self, entry: UUID) -> None:
        self._draining.settled(entry)

    def handed_back(self, entry: UUID, delay: timedelta) -> bool:
        return False  # there is no other replica

    def nacked(self, entry: UUID, delay: timedelta | None) -> None:
        self._draining.attempts[entry] = self._draining.attempts.get(entry, 0) + 1
        self._draining.settled(entry)
