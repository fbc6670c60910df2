"""The shards of a consumer's RabbitMQ queue: created, dealt to, read, and deleted.

A shard is a queue, and an exchange of the same name that is bound to it. The replica
that consumes from the consumer's queue publishes what it receives to the shards, and
acks it once that is confirmed, all on the channel that consumes. What is published
twice was not acked, so it comes again in its order.

A layout, such as that of 8 shards, exists while the exchange of its first shard is
bound: it is created from the first shard on, and deleted from the last one on, by the
replica that consumes from the consumer's queue. That replica deletes a layout once it
reads all of its shards and they are empty, and deals nothing until then.

All functions raise `AMQPError` or `OSError` if the connection is lost, and
`ConfigError` if the user lacks a privilege.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from secrets import token_hex
from typing import Any, Final

import pika
from pika import spec
from pika.exceptions import AMQPError, ChannelClosedByBroker

from pillarbox.inbox.sources.rabbitmq.queue import (
    Arrival,
    OnArrival,
    Queue,
    QueueConfig,
    declare,
    marker,
)
from pillarbox.outbox.brokers.rabbitmq.amqp import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    AmqpConnection,
)
from pillarbox.outbox.brokers.rabbitmq.message import from_delivery
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.errors import ConfigError

MOST: Final = 16
LONGEST_SUFFIX: Final = f".shard-{MOST}-of-{MOST}"
_FORBIDDEN: Final = 403
# How long a reader that leaves a shard to another one can settle what it has begun.
_HANDOVER: Final = 10.0


class Dealer:
    """Publishes the deliveries of a consumer's queue to shards, and then acks them.

    Attributes:
        failure: why it gave up its connection, if it did.
    """

    def __init__(self, link: AmqpConnection, queue: Queue, name: str, of: int) -> None:
        self.failure = ""
        self._link, self._queue, self._name, self._of = link, queue, name, of
        self._published = 0
        # Delivery tags by the number with which they were published.
        self._tags: dict[int, int] = {}

    async def begin(self) -> None:
        """Make the server confirm what is published."""
        channel = self._queue.channel
        channel.pika.add_on_return_callback(lambda *_: self._fail("has no queue"))
        await channel.ask(
            channel.pika.confirm_delivery, ack_nack_callback=self._confirm
        )

    def deal(self, arrival: Arrival) -> None:
        """Publish a delivery, in the order of calls."""
        tag, routing_key, _, properties, body = arrival
        pika = self._queue.channel.pika
        if not pika.is_open:
            return
        message, _ = from_delivery(properties, routing_key, body)
        number = Shard.holding(message, self._of).number
        shard = Shard(self._name, number, self._of).name
        # RabbitMQ refuses a message that another user claims to have published.
        properties.user_id = None
        pika.basic_publish(shard, routing_key, body, properties, mandatory=True)
        self._published += 1
        self._tags[self._published] = tag

    def _confirm(self, frame: Any) -> None:
        last = frame.method.delivery_tag
        if isinstance(frame.method, spec.Basic.Nack):
            self._fail("is full, or down")
        elif frame.method.multiple:
            for number in list(takewhile(lambda n: n <= last, self._tags)):
                self._queue.ack(self._tags.pop(number))
        else:
            self._queue.ack(self._tags.pop(last))

    def _fail(self, problem: str) -> None:
        self.failure = f"queue {self._name!r} can't be distributed: a shard {problem}"
        self._link.abort()


class Shards:
    """The shards that a replica reads.

    Each has a connection, as a queue without shards has, whose end is the end of the
    lock.

    Args:
        keep: called with each delivery.
        drop: called with a queue that another replica shall read, to forget what has
            arrived from it.
    """

    def __init__(
        self,
        parameters: pika.URLParameters,
        prefetch: int,
        keep: OnArrival,
        drop: Callable[[Queue], None],
    ) -> None:
        self._parameters, self._prefetch = parameters, prefetch
        self._keep, self._drop = keep, drop
        # In the order in which they were taken.
        self._reading: dict[Shard, tuple[AmqpConnection, Queue]] = {}
        self._leaving: dict[Shard, float] = {}

    @property
    def queues(self) -> list[Queue]:
        """The queues that it reads."""
        return [queue for _, queue in self._reading.values()]

    @property
    def why_lost(self) -> AMQPError | None:
        """Why one of them is lost; None if none is."""
        return next((why for each in self.queues if (why := each.why_lost)), None)

    async def take(
        self, link: AmqpConnection, config: QueueConfig, of: int, most: int
    ) -> None:
        """Begin to read shards that nobody reads, until it reads `most`."""
        free = [s for s in Shard(config.name, of=of).all if s not in self._reading]
        random.shuffle(free)
        for shard in free:
            if len(self._reading) >= most:
                return
            if not await consumers(link, shard.name):
                await self._read(shard, of_shard(config, shard))

    async def _read(self, shard: Shard, config: QueueConfig) -> None:
        link = await AmqpConnection.open(self._parameters)
        try:
            queue = await Queue.open(link, config)
            if not await queue.take_turn():
                return
            queue.when_lost(link.abort)
            self._reading[shard] = link, queue
            await queue.consume(self._prefetch, self._keep)
        finally:
            if shard not in self._reading:
                await link.close()

    async def are_empty(self, link: AmqpConnection, shards: Sequence[Shard]) -> bool:
        """Return whether it reads all of these shards, and nothing is left in them.

        The count of a queue's messages doesn't show that: it is 0 if the queue doesn't
        answer in time. So each reader gets a marker, behind all that was published.
        """
        if self._reading.keys() != set(shards):
            return False
        for shard, (_, queue) in self._reading.items():
            if not queue.marker:
                queue.marker = token_hex(8)
                properties = marker(queue.marker)
                queue.channel.pika.basic_publish(shard.name, "", b"", properties)
        if not all(queue.is_at_end and queue.is_settled for queue in self.queues):
            return False
        # Another one can only be a dead reader, whose messages aren't back yet.
        return all([await consumers(link, shard.name) == 1 for shard in shards])

    async def leave(self, most: int) -> None:
        """Leave all but `most` of them, when what was begun is settled."""
        now = time.monotonic()
        for shard in list(self._reading)[most:]:
            if shard not in self._leaving:
                self._leaving[shard] = now + _HANDOVER
                self._drop(self._reading[shard][1])
        for shard, latest in list(self._leaving.items()):
            if not self._reading[shard][1].begun or latest <= now:
                await self._end([shard])

    async def close(self) -> None:
        """Send the scheduled acks, and return all other messages to the shards."""
        await self._end(list(self._reading))

    async def _end(self, shards: Sequence[Shard]) -> None:
        ending = [self._reading.pop(shard) for shard in shards]
        for shard in shards:
            self._leaving.pop(shard, None)
        for _, queue in ending:
            self._drop(queue)
        try:
            settling = [q.settle() for _, q in ending if q.why_lost is None]
            await asyncio.gather(*settling, return_exceptions=True)
        finally:
            for link, _ in ending:
                link.abort()  # an orderly close would cancel the consumer first
            for link, _ in ending:
                await link.close()


def of_shard(config: QueueConfig, shard: Shard, *, bound: bool = False) -> QueueConfig:
    """Return the queue of a shard of a consumer's queue; `bound` to its exchange."""
    return QueueConfig(
        name=shard.name,
        exchange=shard.name,
        topics=("*",) if bound else (),
        inbound=shard.name,
        classic=config.classic,
        member=config.member,
    )


def members_of(name: str, of: int) -> QueueConfig:
    """Return the queue from which all replicas with a number of shards consume."""
    return QueueConfig(
        name=f"{name}.shards-of-{of}", exchange="", topics=(), classic=True
    )


async def existing(
    link: AmqpConnection, name: str, numbers: Sequence[int], *, optional: bool
) -> list[int]:
    """Return of which of these numbers of shards a queue has a layout.

    `optional`: it has none if the user lacks the privilege to have created it.
    """
    found: list[int] = []
    channel = await link.channel()
    for of in numbers:
        exchange = Shard(name, of=of).name
        try:
            # Unlike a look at it, which is an error in the server's log if the exchange
            # is missing, this does nothing then, nor if it is bound.
            await channel.ask(
                channel.pika.exchange_delete, exchange=exchange, if_unused=True
            )
        except ChannelClosedByBroker as error:
            if error.reply_code == _FORBIDDEN and optional:
                return []
            if error.reply_code != PRECONDITION_FAILED:
                raise ConfigError(
                    f"exchange {exchange!r}: {error.reply_text}; grant the user "
                    f"configure, write and read on {name}.shard*"
                ) from None
            found.append(of)
            channel = await link.channel()
    await channel.close()
    return found


async def consumers(link: AmqpConnection, name: str) -> int:
    """Return how many consumers a queue has; 0 if it doesn't exist."""
    channel = await link.channel()
    try:
        answer = await channel.ask(channel.pika.queue_declare, queue=name, passive=True)
    except ChannelClosedByBroker as error:
        if error.reply_code != NOT_FOUND:
            raise
        return 0
    await channel.close()
    return int(answer.method.consumer_count)


async def create(link: AmqpConnection, config: QueueConfig, of: int) -> None:
    """Create what is missing of a layout."""
    await declare(link, members_of(config.name, of))
    for shard in Shard(config.name, of=of).all:
        queue = await Queue.open(link, of_shard(config, shard, bound=True))
        await queue.channel.close()


async def delete(link: AmqpConnection, name: str, of: int) -> None:
    """Delete a layout."""
    channel = await link.channel()
    ask, pika = channel.ask, channel.pika
    await ask(pika.queue_delete, queue=members_of(name, of).name)
    for shard in reversed(Shard(name, of=of).all):
        await ask(pika.queue_delete, queue=shard.name)
        await ask(pika.exchange_delete, exchange=shard.name)
    await channel.close()


async def join(link: AmqpConnection, name: str, of: int) -> None:
    """Count among the replicas with a number of shards while the connection lasts."""
    members = members_of(name, of)
    await declare(link, members)
    channel = await link.channel()
    channel.pika.add_on_cancel_callback(lambda _: link.abort())
    await channel.ask(
        channel.pika.basic_consume,
        queue=members.name,
        on_message_callback=lambda *_: None,
    )
