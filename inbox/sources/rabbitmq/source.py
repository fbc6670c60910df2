"""A source that reads a RabbitMQ queue; each consumer has its own.

RabbitMQ delivers messages to any consumer of a queue that has room, so one replica at a
time consumes, and the others stand by, unless `share` is called. A message that waits
for its retry is held here unacked, as are later messages of its key: whatever happens
to this process, RabbitMQ redelivers them, in order and before all others.

A quorum queue appends what is returned to earlier returns that nobody has received yet.
So a replica that keeps order has one consumer, whose prefetch never changes.
"""

import asyncio
import math
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Final, Self
from uuid import UUID

from pika import BasicProperties, spec

from pillarbox.inbox.consuming.backlog import Backlog
from pillarbox.inbox.poison.history import FIRST_DELIVERY, REDELIVERED
from pillarbox.inbox.source import Abilities, Arrived, Delivery, EntryDelivery
from pillarbox.inbox.sources.rabbitmq.queue import (
    OWNER_SUFFIX,
    Queue,
    QueueConfig,
    binding_key,
)
from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.brokers.rabbitmq.amqp import AmqpConnection
from pillarbox.outbox.brokers.rabbitmq.connection import (
    BROKEN,
    rabbitmq_parameters,
    rabbitmq_unavailable,
)
from pillarbox.outbox.brokers.rabbitmq.message import from_delivery, published_at
from pillarbox.outbox.brokers.rabbitmq.options import MAX_NAME_BYTES, RabbitMQOptions
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError, shorten
from pillarbox.outbox.retry import jittered

_LEAST_PREFETCH: Final = 100
# The same for all replicas, whatever their limits: see above. It is how far urgent
# messages are found behind others.
_PREFETCH_IN_ORDER: Final = 6000
_MAX_PREFETCH: Final = 65_535
_MAX_ASIDE: Final = 10_000
_ASIDE_PER_SECOND: Final = 2000
# How often a replica that stands by looks whether it can consume.
_LOOK: Final = 0.25
# How long a replica without a handler lets others consume, and how long it then goes on
# before it does so again: longer each time, until messages have long had handlers.
_STEP_ASIDE: Final = 1.0
_LONGEST_TURN: Final = 30.0


@dataclass(eq=False, slots=True, kw_only=True)
class Received(Arrived):
    """A message on the channel on which it arrived; `place` is its delivery tag there.

    `attempts` is how often it failed here, on this channel or an earlier one.
    """

    queue: Queue
    place: int

    @property
    def key(self) -> str | None:
        """The message's key."""
        return self.message.key


class RabbitMQSource:
    """A source of the messages in one consumer's queue.

    Args:
        url: `amqp://user:password@host:port/vhost`, `amqps://…` or `rabbitmq://…`,
            with the options of `RabbitMQOptions` and pika's own.
        consumer: the name of the queue, unless the option `queue` specifies one.
        topics: the topics to bind the queue to, each exact or a prefix that ends with a
            dot, followed by `*`.
        poll_interval: how long `receive` waits.
    """

    def __init__(
        self,
        url: str,
        *,
        consumer: str,
        topics: Sequence[str],
        poll_interval: timedelta = timedelta(seconds=1),
    ) -> None:
        self._url, options = RabbitMQOptions.parse(url)
        self._parameters = rabbitmq_parameters(self._url, options)
        for topic in topics:
            binding_key(topic)
        name = options.queue or consumer
        most = MAX_NAME_BYTES - len(OWNER_SUFFIX)
        if len(name.encode()) > most:
            raise ConfigError(
                f"consumer {shorten(name)}: has more than {most} bytes, "
                "RabbitMQ's limit for the name of a queue; shorten it"
            )
        self._config = QueueConfig(
            name=name,
            exchange=options.exchange,
            topics=tuple(topics),
            classic=options.queue_type == "classic",
            single=options.single_active_consumer,
        )
        self._prefetch = options.prefetch
        self._poll = poll_interval.total_seconds()
        self._link: AmqpConnection | None = None
        self._queue: Queue | None = None
        self._backlog: Backlog[Received] = Backlog()
        # Delivery tags of what is handed back, each with the time at which to do so:
        # RabbitMQ would deliver it again at once, before all others.
        self._aside: dict[int, float] = {}
        self._keys_aside: dict[str, float] = {}
        self._window = 0
        self._arrived = asyncio.Event()
        # Kept across channels: unacked messages are redelivered on the next channel.
        self._failures: BoundedDict[UUID, tuple[int, float]] = BoundedDict()
        self._done: BoundedDict[UUID, bool] = BoundedDict()
        self._shared = False
        self._standing_by: Collection[str] = ()
        # When to step aside, until when, and from when on it may happen again.
        self._leave_at = math.inf
        self._aside_until = self._stays_until = -math.inf
        self._turn = _STEP_ASIDE
        self._warnings: list[str] = []
        self.abilities = Abilities(
            leave_out=self._backlog.leave_out,
            identify=self._identify,
            share=self._share,
            standing_by=lambda: self._standing_by,
            warnings=lambda: self._warnings,
        )

    def _share(self) -> None:
        self._shared = True

    def _identify(self, id: str) -> None:
        self._config = replace(self._config, member=id)

    async def __aenter__(self) -> Self:
        """Connect; create the exchange, the queue and its bindings if missing.

        Raises:
            BrokerUnavailableError: RabbitMQ is unreachable, or rejects the connection.
            ConfigError: something is missing, and the user lacks the privilege to
                create it.
        """
        try:
            queue = await self._connect()
            if not (self._shared or self._config.single):
                await queue.take_turn()
        except BaseException as error:
            await self._disconnect()
            if isinstance(error, BROKEN):
                raise rabbitmq_unavailable(self._url, error) from error
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Send the scheduled acks, and return all other messages to the queue."""
        await self._leave()

    async def _leave(self) -> None:
        queue, link = self._queue, self._link
        try:
            if queue is not None and link is not None and queue.why_lost is None:
                with suppress(*BROKEN):
                    await queue.settle()
                if self._config.single or not self._shared:
                    # An orderly close would cancel the consumer first, so the next
                    # replica would start before it has the returned messages.
                    link.abort()
        finally:
            await self._disconnect()

    async def receive(self, *, limit: int) -> Sequence[Delivery]:
        """Wait for deliveries, and return at most `limit`."""
        try:
            if self._leave_at <= time.monotonic():
                await self._step_aside()
            queue = self._queue
            if queue is None:
                queue = await self._connect()
            elif (reason := queue.why_lost) is not None:
                self._forget()
                raise reason
            if not queue.consuming:
                if not await self._may_consume(queue):
                    return []
                self._prefetch = self._prefetch or (
                    max(_LEAST_PREFETCH, 4 * limit)
                    if self._shared
                    else _PREFETCH_IN_ORDER
                )
                self._window = min(self._prefetch, _MAX_PREFETCH)
                await queue.consume(self._window, partial(self._keep, queue))
            await self._hand_back(queue)
            if not self._backlog.ready:
                queue.flush()
                await self._wait(queue)
        except ConfigError as error:
            raise BrokerUnavailableError(str(error)) from error
        except BROKEN as error:
            raise rabbitmq_unavailable(self._url, error) from error
        return [
            EntryDelivery(self, received, received)
            for received in self._backlog.take(limit)
            if not self._is_behind(received)
        ]

    def acked(self, received: Received) -> None:
        """Schedule the ack of a message, unless its connection has been lost."""
        self._failures.pop(received.message.id, None)
        self._done[received.message.id] = True
        if received.queue is self._queue:
            received.queue.ack(received.place)

    def nacked(self, received: Received, delay: timedelta | None) -> None:
        """Return a message to its place in the order, or delay it."""
        if delay is not None:
            received.attempts += 1
            due = time.monotonic() + delay.total_seconds()
            self._failures[received.message.id] = (received.attempts, due)
        if received.queue is not self._queue:
            return  # RabbitMQ redelivers it
        if delay is None:
            self._backlog.add(received)
        else:
            self._backlog.defer(received, delay.total_seconds())
        self._arrived.set()

    def handed_back(self, received: Received, delay: timedelta) -> bool:
        """Return a message to the queue after the delay; meanwhile keep its tag only.

        To keep its order it waits here, and the next `receive` lets another replica
        consume, if there is one.
        """
        if received.queue is not self._queue:
            return True  # RabbitMQ redelivers it
        seconds = delay.total_seconds()
        if not self._shared:
            now = time.monotonic()
            self._failures[received.message.id] = (received.attempts, now + seconds)
            self._backlog.defer(received, seconds)
            self._leave_at = min(self._leave_at, max(now, self._stays_until))
            self._arrived.set()
            return True
        if self._config.single or len(self._aside) >= _MAX_ASIDE:
            return False
        if self._window > (self._prefetch or 0):
            # Each return of a flood fills another replica's prefetch only once.
            seconds = min(seconds, 1 + len(self._aside) / _ASIDE_PER_SECOND)
        due = time.monotonic() + seconds
        self._aside[received.place] = due
        if received.key is not None:
            self._keys_aside.setdefault(received.key, due)
        return True

    def _is_behind(self, received: Received) -> bool:
        """Return whether a message of its key is aside; then it follows that."""
        due = self._keys_aside.get(received.key or "")
        if due is None or received.key is None:
            return False
        self._aside[received.place] = due
        return True

    async def _hand_back(self, queue: Queue) -> None:
        now = time.monotonic()
        for tag in sorted(tag for tag, due in self._aside.items() if due <= now):
            del self._aside[tag]
            queue.requeue(tag)
        self._keys_aside = {k: due for k, due in self._keys_aside.items() if due > now}
        if 2 * len(self._aside) >= self._window:
            # What is aside leaves the others too little of the prefetch.
            await queue.consume(self._window, partial(self._keep, queue))
            self._window *= 2

    async def _step_aside(self) -> None:
        """Let another replica consume, if there is one."""
        now = time.monotonic()
        is_new = now > self._stays_until + 2 * _LONGEST_TURN
        self._turn = _STEP_ASIDE if is_new else min(2 * self._turn, _LONGEST_TURN)
        self._aside_until = now + _STEP_ASIDE
        self._stays_until = self._aside_until + self._turn
        self._leave_at = math.inf
        await self._leave()

    async def _may_consume(self, queue: Queue) -> bool:
        """Return whether it's this replica's turn; if not, wait a little."""
        if self._aside_until <= time.monotonic():
            if self._shared or self._config.single or await queue.take_turn():
                self._standing_by = ()
                return True
            self._standing_by = self._config.topics
        await asyncio.sleep(min(self._poll, jittered(_LOOK)))
        return False

    async def _connect(self) -> Queue:
        if self._link is None or not self._link.is_open:
            self._link = await AmqpConnection.open(self._parameters)
        queue = await Queue.open(self._link, self._config)
        self._queue = queue
        if queue.limited:
            self._warnings = [
                f"queue {self._config.name!r} has no x-delivery-limit of -1: RabbitMQ "
                "drops a message that was returned more often than its limit, by "
                "default 20 times; set delivery-limit to -1 by a policy, or delete the "
                "empty queue, which the consumer creates again"
            ]
        queue.when_lost(self._arrived.set)
        if not self._shared:
            # Otherwise, it would keep the lock until there is room for messages.
            queue.when_lost(self._link.abort)
        return queue

    async def _disconnect(self) -> None:
        link, self._link = self._link, None
        self._forget()
        if link is not None:
            await link.close()

    def _forget(self) -> None:
        """Forget the channel and everything received on it."""
        self._queue = None
        self._backlog.remove(lambda _: True)
        self._aside.clear()
        self._keys_aside.clear()

    def _keep(
        self,
        queue: Queue,
        method: spec.Basic.Deliver,
        properties: BasicProperties,
        body: bytes,
    ) -> None:
        if queue is not self._queue:
            return
        tag, routing_key = method.delivery_tag, method.routing_key
        assert tag is not None
        assert routing_key is not None
        message, problem = from_delivery(properties, routing_key, body)
        if method.redelivered and message.id in self._done:
            queue.ack(tag)  # the first ack was lost with its connection
            return
        attempts, due = self._failures.get(message.id, (0, 0.0))
        received = Received(
            queue=queue,
            place=tag,
            message=message,
            problem=problem,
            history=REDELIVERED if method.redelivered else FIRST_DELIVERY,
            published_at=published_at(properties),
            attempts=attempts,
        )
        if (wait := due - time.monotonic()) > 0:
            self._backlog.defer(received, wait)
        else:
            self._backlog.add(received)
        self._arrived.set()

    async def _wait(self, queue: Queue) -> None:
        deadline = time.monotonic() + self._backlog.patience(self._poll)
        while not self._backlog.ready and queue.why_lost is None:
            patience = deadline - time.monotonic()
            if patience <= 0:
                return
            self._arrived.clear()
            await self._backlog.wait_for(self._arrived, patience)
