"""The publisher confirms of one RabbitMQ channel, collected batch by batch."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from pika import BasicProperties, spec
from pika.channel import Channel as PikaChannel
from pika.exceptions import AMQPError, ChannelClosedByBroker

from pillarbox.outbox.brokers.rabbitmq.amqp import AmqpConnection, Channel
from pillarbox.outbox.brokers.rabbitmq.message import to_properties
from pillarbox.outbox.errors import shorten
from pillarbox.relay.answers import Answers
from pillarbox.relay.publisher import Acked, Nacked

_ACKED = Acked()


@dataclass(frozen=True, slots=True)
class Full:
    """A queue for the topic accepts no messages now; the message isn't to blame."""

    topic: str

    @property
    def reason(self) -> str:
        """The reason; RabbitMQ doesn't say which of the two it is, nor which queue."""
        return f"a queue for topic {shorten(self.topic)} is full or not available"


Answer: TypeAlias = Acked | Nacked | Full


class BlockedError(AMQPError):
    """The server accepts no messages right now: it is short of memory or disk space."""


class Confirms:
    """A channel in confirm mode.

    Attributes:
        link: its connection.
        proven: whether a message has been confirmed on it.
    """

    def __init__(
        self, link: AmqpConnection, channel: Channel, exchange: str, *, mandatory: bool
    ) -> None:
        self.link = link
        self.proven = False
        self._channel = channel
        self._exchange = exchange
        self._mandatory = mandatory
        self._last_tag = 0
        self._confirmed_tag = 0
        self._open: dict[int, tuple[Answers[Answer], int]] = {}
        self._unroutable: set[str | None] = set()

    @classmethod
    async def open(
        cls, link: AmqpConnection, exchange: str, *, mandatory: bool
    ) -> Self:
        """Open a channel, and create the exchange if it is missing.

        Raises:
            AMQPError, OSError: the connection is lost.
            ConfigError: the exchange is missing, and the user lacks the privilege to
                create it.
        """
        channel = await link.channel_with_exchange(exchange)
        confirms = cls(link, channel, exchange, mandatory=mandatory)
        channel.pika.add_on_return_callback(confirms._on_return)
        await channel.ask(
            channel.pika.confirm_delivery, ack_nack_callback=confirms._on_confirm
        )
        return confirms

    @property
    def closed(self) -> bool:
        """Whether it can't be used for publishing."""
        return (
            self._channel.closed.done()
            or not self._channel.pika.is_open
            # The channel of an aborted connection is closed only in the next iteration
            # of the event loop.
            or not self.link.is_open
        )

    @property
    def refusal(self) -> ChannelClosedByBroker | None:
        """Why RabbitMQ closed the channel but not the connection, if it did."""
        reason = self._channel.closed.done() and self._channel.closed.result()
        return reason if isinstance(reason, ChannelClosedByBroker) else None

    async def publish(self, answers: Answers[Answer], indexes: Sequence[int]) -> None:
        """Publish messages of a batch and wait for their confirms.

        If RabbitMQ closes the channel, some have no answer.

        Raises:
            BlockedError: the server accepts nothing at the moment; it may still accept
                these messages later.
            AMQPError: this client closed the channel, or the connection is lost.
        """
        answers.expect(indexes)
        publish = self._channel.pika.basic_publish
        for i in indexes:
            message = answers.batch[i]
            try:
                publish(
                    self._exchange,
                    message.topic,
                    message.payload,
                    to_properties(message),
                    self._mandatory,
                )
            except ValueError as error:
                # UTF-8 can't encode a text; no part of the message was sent.
                nacked = Nacked(f"AMQP can't carry it: {error}", permanent=True)
                answers.give(i, nacked)
            else:
                self._last_tag += 1
                self._open[self._last_tag] = answers, i
        done, closed, blocked = answers.done, self._channel.closed, self.link.blocked
        await asyncio.wait({done, closed, blocked}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done() and self.refusal is None:
            raise closed.result() if closed.done() else BlockedError(blocked.result())

    async def close(self) -> None:
        """Close the channel.

        Raises:
            AMQPError, OSError: the connection is lost.
        """
        await self._channel.close()

    def _on_return(
        self,
        _: PikaChannel,
        __: spec.Basic.Return,
        properties: BasicProperties,
        ___: Any,
    ) -> None:
        # The return arrives before the confirm of the same message.
        self._unroutable.add(properties.message_id)

    def _on_confirm(self, frame: Any) -> None:
        self.proven = True
        method = frame.method
        tag = method.delivery_tag
        nacked = isinstance(method, spec.Basic.Nack)
        if method.multiple:
            for each in range(self._confirmed_tag + 1, tag + 1):
                self._confirm(each, nacked=nacked)
            self._confirmed_tag = tag
        else:
            self._confirm(tag, nacked=nacked)

    def _confirm(self, tag: int, *, nacked: bool) -> None:
        if tag not in self._open:
            return
        answers, i = self._open.pop(tag)
        if not nacked and not self._unroutable:
            answers.give(i, _ACKED)
            return
        message = answers.batch[i]
        id = str(message.id)
        unroutable = id in self._unroutable
        self._unroutable.discard(id)
        if nacked:
            answers.give(i, Full(message.topic))
        elif unroutable:
            answers.give(
                i,
                Nacked(
                    f"no queue is bound to exchange {shorten(self._exchange)} for "
                    f"topic {shorten(message.topic)}; start its consumer, or bind one"
                ),
            )
        else:
            answers.give(i, _ACKED)
