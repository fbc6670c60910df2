"""A consumer's RabbitMQ queue: declared, bound to its topics, and consumed from."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from typing import Any, Final, NamedTuple, Self, TypeAlias

from pika import BasicProperties, spec
from pika.channel import Channel as PikaChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker

from pillarbox.outbox.brokers.rabbitmq.amqp import (
    NOT_FOUND,
    PRECONDITION_FAILED,
    AmqpConnection,
    Channel,
)
from pillarbox.outbox.brokers.rabbitmq.options import MAX_NAME_BYTES
from pillarbox.outbox.errors import ConfigError, shorten


class Arrival(NamedTuple):
    """A delivery from RabbitMQ; the queue acks its tag."""

    tag: int
    routing_key: str
    is_redelivered: bool
    properties: BasicProperties
    body: bytes


OnArrival: TypeAlias = Callable[["Queue", Arrival], None]

OWNER_SUFFIX: Final = ".owner"
"""Ends the name of the queue that is the lock of another one."""

END: Final = "pillarbox-end"
"""A header of a marker: a message that is no delivery, and is acked when it arrives."""

_SINGLE: Final = "x-single-active-consumer"
_LIMIT: Final = "x-delivery-limit"
_TYPE: Final = "x-queue-type"
# From this version on, a quorum queue without a limit of its own drops a message that
# has been returned 20 times.
_LIMITED: Final = (4, 0)
_UNLIMITED: Final = -1
_LOCKED: Final = 405
_REFUSED: Final = 403
_FORBIDDEN: Final = (_REFUSED, _LOCKED)
_CONFIRM: Final = 10.0
_GATHER: Final = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """A queue, and how it is created if it is missing.

    Attributes:
        name: the name of the queue.
        exchange: the exchange that it is bound to.
        topics: the topics it is bound to, each exact or a prefix followed by `*`;
            without topics, it is left as it is bound.
        classic: create a classic queue instead of a quorum queue.
        inbound: an exchange that is bound to this queue only; by default the server's
            default exchange.
        member: an id of the handlers' database, for the consumer's tag.
        single: only one replica at a time receives messages; when it leaves, another
            takes over.
    """

    name: str
    exchange: str
    topics: Sequence[str]
    classic: bool = False
    single: bool = False
    inbound: str = ""
    member: str = ""

    def arguments(self, version: tuple[int, ...]) -> dict[str, Any]:
        """Return the arguments that declare the queue on a server of this version."""
        arguments: dict[str, Any] = {_TYPE: "classic" if self.classic else "quorum"}
        if self.single:
            arguments[_SINGLE] = True
        if not self.classic and version >= _LIMITED:
            arguments[_LIMIT] = _UNLIMITED
        return arguments


def binding_key(topic: str) -> str:
    """Return the binding key of a topic: for `orders.*`, `orders.*.#`.

    `orders.#` would also match `orders`, which doesn't begin with `orders.`.

    Raises:
        ConfigError: no binding key matches exactly these topics.
    """
    if topic == "*":
        return "#"
    prefix = topic.removesuffix("*")
    words = prefix.split(".")
    if {"*", "#"} & set(words):
        problem = "has * or # as a word, which RabbitMQ treats as a wildcard"
    elif topic != prefix and words[-1]:
        problem = "doesn't end with a whole word, and RabbitMQ compares whole words"
    elif len(prefix.encode()) > MAX_NAME_BYTES - len("*.#"):
        problem = f"has more than {MAX_NAME_BYTES - len('*.#')} bytes"
    else:
        return topic if topic == prefix else f"{prefix}*.#"
    raise ConfigError(f"topic {shorten(topic)}: {problem}; write orders.* or another")


class Queue:
    """A channel that consumes from the queue until the channel is lost.

    Acks are batched: those of an unbroken run from the oldest delivery are sent as one.

    Attributes:
        consuming: whether it receives deliveries, and they are wanted.
        limited: whether RabbitMQ may drop messages that are returned to this queue.
        begun: how many deliveries handlers have, as counted by the owner.
        unmarked: why no marker shows what it holds, and a remedy; see `take_turn`.
        marker: what was published to find the end of the queue.
        is_at_end: whether that has arrived.
    """

    def __init__(
        self, link: AmqpConnection, channel: Channel, config: QueueConfig
    ) -> None:
        self.consuming = False
        self.limited = False
        self.unmarked = ""
        self._marks = not config.classic
        self._channel = channel
        self.begun = 0
        self.marker = ""
        self.is_at_end = False
        self._link = link
        self._config = config
        self._unacked: dict[int, None] = {}
        self._acked: set[int] = set()
        self._flushing: asyncio.TimerHandle | None = None

    @classmethod
    async def open(cls, link: AmqpConnection, config: QueueConfig) -> Self:
        """Open a channel; create the exchange, the queue and its bindings if missing.

        An existing queue is used as it is.

        Raises:
            AMQPError, OSError: the connection is lost.
            ConfigError: something is missing and the user lacks the privilege to create
                it, or the queue exists with another setting of single active consumer.
        """
        declared = await declare(link, config)
        channel = await (
            link.channel_with_exchange(config.exchange)
            if config.topics
            else link.channel()
        )
        for topic in config.topics:
            try:
                await channel.ask(
                    channel.pika.queue_bind,
                    queue=config.name,
                    exchange=config.exchange,
                    routing_key=binding_key(topic),
                )
            except ChannelClosedByBroker as error:
                raise ConfigError(
                    f"queue {config.name!r} can't be bound to exchange "
                    f"{config.exchange!r}: {error.reply_text}"
                ) from None

        def on_cancel(_: object) -> None:
            if channel.pika.is_open:  # each consumer of the queue is cancelled
                channel.pika.close(
                    reply_text=f"queue {config.name!r} was deleted, or lost its leader"
                )

        channel.pika.add_on_cancel_callback(on_cancel)
        queue = cls(link, channel, config)
        queue.limited = declared.is_limited
        if not config.classic:
            queue._marks, queue.unmarked = declared.may_mark, declared.unmarked
        return queue

    @property
    def name(self) -> str:
        """The name of the queue."""
        return self._config.name

    @property
    def why_lost(self) -> AMQPError | None:
        """Why the channel is lost; None if it isn't."""
        if self._channel.closed.done():
            reason: AMQPError = self._channel.closed.result()
            return reason
        return None if self._channel.pika.is_open else AMQPError("it is being closed")

    def when_lost(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the channel is lost."""
        self._channel.closed.add_done_callback(lambda _: callback())

    @property
    def channel(self) -> Channel:
        """The channel."""
        return self._channel

    @property
    def is_settled(self) -> bool:
        """Whether all deliveries are settled."""
        return not self._unacked

    async def take_lock(self) -> bool:
        """Return whether this replica has the lock, for which it asks if it is free.

        An exclusive queue is the lock: it ends with its connection, on which this
        replica consumes, so a replica that has lost the lock can't begin to consume.
        (Quorum queues ignore that a consumer is exclusive.)

        Raises:
            AMQPError, OSError: the channel is lost.
            ConfigError: the user lacks the privilege to declare the lock.
        """
        # A refused lock is an error in the server's log, so look first.
        if await self._has_consumers():
            return False
        channel = await self._link.channel()
        name = f"{self._config.name}{OWNER_SUFFIX}"
        try:
            await channel.ask(
                channel.pika.queue_declare,
                queue=name,
                exclusive=True,
                arguments={_TYPE: "classic"},
            )
        except ChannelClosedByBroker as error:
            if error.reply_code == _LOCKED:
                return False
            raise ConfigError(
                f"can't declare queue {name!r}, which keeps several replicas in order: "
                f"{error.reply_text}; grant the user configure on it, or "
                'set Consumer(order="none")'
            ) from None
        await channel.close()
        return True

    async def take_turn(self) -> bool:
        """Return whether to consume, because nobody else does or is about to.

        The lock can end before the messages of its last owner are back in the queue.
        Then the queue still has that owner's consumer. But a quorum queue that has just
        been started answers without what was done last, and without a leader it has no
        consumers. So it has to confirm a marker first, unless that could make it drop
        a message.

        Raises: as `take_lock`.
        """
        return (
            await self.take_lock()
            and (not self._marks or await self._confirms())
            and not await self._has_consumers()
        )

    async def _confirms(self) -> bool:
        """Return whether the queue confirms a marker, or the user may publish none."""
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Any] = loop.create_future()
        # A low memory or disk stops a connection after its next message, with its acks.
        link = await self._link.another()
        try:
            channel = await link.channel()
            await channel.ask(
                channel.pika.confirm_delivery,
                ack_nack_callback=lambda frame: _answer(answered, frame.method),
            )
            channel.pika.basic_publish(
                self._config.inbound, self._config.name, b"", marker(token_hex(8))
            )
            await asyncio.wait(
                {answered, channel.closed},
                timeout=_CONFIRM,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if channel.closed.done():
                raise channel.closed.result()
        except ChannelClosedByBroker as error:
            if error.reply_code == NOT_FOUND:
                return False  # the exchange of a shard, which is being created
            if error.reply_code != _REFUSED:
                raise
            self.unmarked = f"{error.reply_text}; grant the user write on it"
            return True
        finally:
            if link.blocked.done() or not answered.done():
                link.abort()  # it would not answer
            await link.close()
        if not answered.done():
            return False
        if isinstance(answered.result(), spec.Basic.Ack):
            return True
        # It is full, or it is down: then it seems to have no messages.
        return bool((await self._declared()).message_count)

    async def _has_consumers(self) -> bool:
        return bool((await self._declared()).consumer_count)

    async def _declared(self) -> Any:
        declared = await self._channel.ask(
            self._channel.pika.queue_declare, queue=self._config.name, passive=True
        )
        return declared.method

    async def consume(self, prefetch: int, on_arrival: OnArrival) -> None:
        """Start to receive deliveries, with at most `prefetch` of them unacked.

        Another call adds to the first, and gets what other replicas have no room for.
        Changing `prefetch` requires a cancel, which could let another replica start and
        would requeue unacked messages out of order.

        Raises:
            AMQPError, OSError: the channel is lost.
        """

        def deliver(
            _: PikaChannel,
            method: spec.Basic.Deliver,
            properties: BasicProperties,
            body: bytes,
        ) -> None:
            tag, routing_key = method.delivery_tag, method.routing_key
            assert tag is not None
            assert routing_key is not None
            self._unacked[tag] = None
            if not body and properties.headers and END in properties.headers:
                ends = properties.headers[END] == self.marker
                self.is_at_end = self.is_at_end or ends
                self.ack(tag)
                return
            again = bool(method.redelivered)
            on_arrival(self, Arrival(tag, routing_key, again, properties, body))

        pika = self._channel.pika
        await self._channel.ask(pika.basic_qos, prefetch_count=prefetch)
        priority, self.consuming = -1 if self.consuming else 0, True
        await self._channel.ask(
            pika.basic_consume,
            queue=self._config.name,
            on_message_callback=deliver,
            arguments={"x-priority": priority},
            consumer_tag=f"{socket.gethostname()}-{os.getpid()}-{token_hex(4)}"
            f"-{self._config.member}",
        )

    def ack(self, tag: int) -> None:
        """Schedule the ack of a delivery."""
        self._acked.add(tag)
        if self._flushing is None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(_GATHER, self.flush)

    def requeue(self, tag: int) -> None:
        """Return a delivery to the queue, for any replica."""
        del self._unacked[tag]
        self._channel.pika.basic_reject(tag, requeue=True)

    def flush(self) -> None:
        """Send the scheduled acks."""
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if not self._acked or self.why_lost is not None:
            return
        last = 0
        for tag in self._unacked:
            if tag not in self._acked:
                break
            last = tag
        if last:
            self._channel.pika.basic_ack(last, multiple=True)
        for tag in self._acked:
            if tag > last:
                self._channel.pika.basic_ack(tag)
            del self._unacked[tag]
        self._acked.clear()

    async def settle(self) -> None:
        """Send the scheduled acks, and wait until the server has processed them.

        Raises:
            AMQPError, OSError: the channel is lost.
        """
        self.flush()
        # Any method with a reply will do: the server processes methods in order.
        await self._channel.ask(self._channel.pika.basic_qos, prefetch_count=1)


def _answer(future: "asyncio.Future[Any]", method: object) -> None:
    if not future.done():
        future.set_result(method)


def marker(id: str) -> BasicProperties:
    """Return the properties of a marker."""
    return BasicProperties(headers={END: id})  # type: ignore[no-untyped-call]


class Declared(NamedTuple):
    """What is known about a queue.

    Attributes:
        is_limited: whether it limits deliveries.
        may_mark: whether it certainly drops no message if a marker is published to it.
        unmarked: why not, and the remedy, unless it is known to need no marker.
    """

    is_limited: bool
    may_mark: bool = True
    unmarked: str = ""


async def declare(link: AmqpConnection, config: QueueConfig) -> Declared:
    """Create the queue if it is missing."""
    limited = False
    arguments = config.arguments(link.server_version)
    while True:
        channel = await link.channel()
        try:
            await channel.ask(
                channel.pika.queue_declare,
                queue=config.name,
                durable=True,
                arguments=arguments,
            )
        except ChannelClosedByBroker as error:
            if error.reply_code not in (PRECONDITION_FAILED, *_FORBIDDEN):
                raise
            text, may = error.reply_text, error.reply_code == PRECONDITION_FAILED
        else:
            await channel.close()
            return Declared(limited)
        if _SINGLE in text:
            raise ConfigError(
                f"queue {config.name!r} exists with a different {_SINGLE} setting; "
                "delete the queue, or restore the option"
            )
        if _LIMIT not in text or arguments.pop(_LIMIT, None) is None:
            break
        limited = True
    # The queue exists with other arguments, or the user lacks the privilege to declare.
    channel = await link.channel()
    try:
        await channel.ask(channel.pika.queue_declare, queue=config.name, passive=True)
    except ChannelClosedByBroker as error:
        if error.reply_code == NOT_FOUND:
            raise ConfigError(
                f"queue {config.name!r} doesn't exist and can't be created: {text}"
            ) from None
        raise ConfigError(f"queue {config.name!r}: {error.reply_text}") from None
    await channel.close()
    if _TYPE in text:  # only quorum queues need markers
        return Declared(limited, may_mark=False)
    remedy = (
        "recreate it when it is empty, with these arguments in a policy"
        if may
        else "grant the user configure on it"
    )
    return Declared(limited, may_mark=False, unmarked=f"{text}; {remedy}")
