"""A publisher for a topic exchange of RabbitMQ; the routing key is the topic.

A batch is sent in order over one channel, and then its confirms are collected. RabbitMQ
can refuse a message and accept the next of its key if no queue is bound to its topic,
or if a queue with `reject-publish` is full.
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Final, Self

from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.brokers.rabbitmq.amqp import PRECONDITION_FAILED, AmqpConnection
from pillarbox.outbox.brokers.rabbitmq.connection import (
    BROKEN,
    rabbitmq_parameters,
    rabbitmq_unavailable,
)
from pillarbox.outbox.brokers.rabbitmq.message import why_impossible
from pillarbox.outbox.brokers.rabbitmq.options import RabbitMQOptions
from pillarbox.outbox.errors import (
    BrokerTimeoutError,
    BrokerUnavailableError,
    ConfigError,
)
from pillarbox.outbox.message import Message
from pillarbox.outbox.url import without_password
from pillarbox.relay.answers import Answers, PublishedIds
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, nack_too_large
from pillarbox.relay.publishers.rabbitmq.confirms import (
    Answer,
    BlockedError,
    Confirms,
    Full,
)

# If a channel publishes to a quorum queue without a leader, as after a restart, it may
# never receive a confirm; the next channel does.
_FIRST_PATIENCE: Final = 3.0
_RECENTLY: Final = 30.0
# Two topics are enough to determine whether another topic was acked.
_TOPICS: Final = 2


class RabbitMQPublisher:
    """Publishes persistent messages, and waits for the confirms of each batch.

    Args:
        url: `amqp://user:password@host:port/vhost`, `amqps://…` or `rabbitmq://…`, with
            the options of `RabbitMQOptions` and of pika.

    Raises:
        ConfigError: the URL can't be used.
    """

    def __init__(self, url: str) -> None:
        self._url, options = RabbitMQOptions.parse(url)
        self._parameters = rabbitmq_parameters(self._url, options)
        self.identity = RabbitMQOptions.identity(url)
        self._exchange = options.exchange
        self._mandatory = options.unroutable == "keep"
        self._max_payload_bytes = options.max_payload_bytes
        self._timeout = options.timeout.total_seconds()
        self._patience = min(_FIRST_PATIENCE, self._timeout)
        self._entered = False
        self._link: AmqpConnection | None = None
        self._confirms: Confirms | None = None
        self._turn = asyncio.Lock()
        self._published = PublishedIds()
        # When the most recently acked topics were last acked on this connection.
        self._acked_at: BoundedDict[str, float] = BoundedDict(_TOPICS)

    async def __aenter__(self) -> Self:
        """Connect, and create the exchange if it is missing.

        Raises:
            BrokerUnavailableError: RabbitMQ is unreachable, or rejects the connection.
            ConfigError: the exchange is missing, and the user lacks the privilege to
                create it.
        """
        self._entered = True
        try:
            await self._connected()
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, BROKEN):
                raise rabbitmq_unavailable(self._url, error) from error
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect; unconfirmed messages count as not published."""
        self._entered = False
        link, self._link = self._link, None
        if link is not None:
            await link.close()

    async def check(self) -> None:
        """Open and close a channel.

        Raises:
            BrokerUnavailableError: RabbitMQ doesn't respond, or accepts nothing at the
                moment.
        """
        try:
            link = (await self._connected()).link
            if link.blocked.done():
                raise self._takes_nothing(link.blocked.result())
            try:
                await (await link.channel()).close()
            except (asyncio.CancelledError, TimeoutError):
                link.abort()
                raise
        except ConfigError as error:
            raise BrokerUnavailableError(str(error)) from error
        except BROKEN as error:
            raise rabbitmq_unavailable(self._url, error) from error

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Publish the batch in order, and collect its confirms.

        Raises:
            BrokerUnavailableError: the connection broke, RabbitMQ blocks it for lack of
                memory or disk space, or doesn't confirm in time; or a queue accepts
                nothing, and no message to another topic was accepted recently. The next
                call reconnects. This publisher doesn't republish messages that were
                acked before the error.
        """
        answers: Answers[Answer] = Answers(batch, map(self._check, batch))
        with self._published.kept(answers):
            if sent := answers.left:
                await self._publish_all(answers)
                acked = (i for i in sent if isinstance(answers.given[i], Acked))
                for topic in dict.fromkeys(batch[i].topic for i in acked):
                    self._acked_at[topic] = time.monotonic()
            return [self._confirmation_of(answer) for answer in answers.complete()]

    async def _publish_all(self, answers: Answers[Answer]) -> None:
        try:
            await self._publish(answers, answers.left, await self._connected())
            # One of those left made RabbitMQ close the channel; find out which.
            await self._publish_singly(answers)
        except ConfigError as error:
            raise BrokerUnavailableError(str(error)) from error
        except BlockedError as error:
            raise self._takes_nothing(error) from error
        except BROKEN as error:
            raise rabbitmq_unavailable(self._url, error) from error

    async def _publish(
        self, answers: Answers[Answer], indexes: Sequence[int], confirms: Confirms
    ) -> None:
        link = confirms.link
        if link.blocked.done():
            raise BlockedError(link.blocked.result())
        limit = self._timeout if confirms.proven else self._patience
        try:
            async with asyncio.timeout(limit):
                await confirms.publish(answers, indexes)
        except TimeoutError:
            link.abort()
            if not confirms.proven:
                self._patience = min(limit * 2, self._timeout)
            raise BrokerTimeoutError(
                f"broker {without_password(self._url)} can't be reached: "
                f"not all confirms within {limit:g} s"
            ) from None
        except asyncio.CancelledError:
            # The caller stopped waiting for this connection, which may be dead.
            link.abort()
            raise
        self._patience = min(_FIRST_PATIENCE, self._timeout)

    async def _publish_singly(self, answers: Answers[Answer]) -> None:
        alone: Confirms | None = None
        for i in answers.left:
            if alone is None or alone.closed:
                # On a separate channel, so that no other message is blamed.
                async with self._turn:
                    alone = await self._open_confirms()
            await self._publish(answers, [i], alone)
            why = alone.refusal
            if answers.given[i] is None and why is not None:
                permanent = why.reply_code == PRECONDITION_FAILED
                reason = f"RabbitMQ refused it: {why.reply_text}"
                answers.give(i, Nacked(reason, permanent=permanent))
        if alone is not None and not alone.closed:
            await alone.close()

    def _confirmation_of(self, answer: Answer) -> Confirmation:
        """Return the confirmation for an answer; raise if RabbitMQ is to blame."""
        match answer:
            case Full(topic):
                recently = time.monotonic() - _RECENTLY
                acked_at = self._acked_at.items()
                if not any(t != topic and at > recently for t, at in acked_at):
                    raise self._takes_nothing(answer.reason)
                return Nacked(f"RabbitMQ nacked it: {answer.reason}")
            case _:
                return answer

    def _takes_nothing(self, reason: object) -> BrokerUnavailableError:
        return BrokerUnavailableError(
            f"broker {without_password(self._url)} is not accepting messages: {reason}"
        )

    async def _connected(self) -> Confirms:
        async with self._turn:
            confirms = self._confirms
            if confirms is None or confirms.closed or confirms.link is not self._link:
                self._confirms = None
                self._confirms = confirms = await self._open_confirms()
            return confirms

    async def _open_confirms(self) -> Confirms:
        if not self._entered:
            raise BrokerUnavailableError(
                f"broker {without_password(self._url)}: the publisher is closed"
            )
        if self._link is None or not self._link.is_open:
            self._link = await AmqpConnection.open(self._parameters)
            self._acked_at.clear()
        return await Confirms.open(
            self._link, self._exchange, mandatory=self._mandatory
        )

    def _check(self, message: Message) -> Acked | Nacked | None:
        if self._published.pop(message.id):
            return Acked()
        if too_large := nack_too_large(message.payload, self._max_payload_bytes):
            return too_large
        problem = why_impossible(message)
        return None if problem is None else Nacked(problem, permanent=True)
