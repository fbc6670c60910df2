"""A publisher for Redis Streams: a topic maps to a stream, a message to its fields.

A batch is one MULTI … EXEC in one round trip: a server that is out of memory or has
become a replica accepts all of it or nothing, so order is preserved. Redis can refuse
a single entry only if the topic names a key that isn't a stream; later messages of the
same ordering key to other topics then overtake the refused one.
"""

from collections.abc import Sequence
from typing import Any, Self

from redis.exceptions import NoPermissionError

from outbox.brokers.redis.connection import (
    close_client,
    redis_client,
    redis_errors,
    refuse_cluster,
)
from outbox.brokers.redis.options import RedisOptions
from outbox.cloudevents.fields import to_fields
from outbox.errors import BrokerUnavailableError
from outbox.message import Message
from relay.answers import Answers
from relay.publisher import Acked, Confirmation, Nacked, nack_too_large


class RedisPublisher:
    """Publishes with XADD.

    Args:
        url: `redis://host:port/db` or `rediss://…`, with the options of `RedisOptions`.

    Raises:
        ConfigError: the URL can't be used.
    """

    def __init__(self, url: str) -> None:
        address, options = RedisOptions.parse(url)
        self._url = address
        self._entered = False
        self._client = redis_client(address)
        self.identity = RedisOptions.identity(url)
        # Redis doesn't remove acked entries; trimming limits the stream.
        self._trim = () if options.maxlen is None else ("MAXLEN", "~", options.maxlen)
        self._max_payload_bytes = options.max_payload_bytes

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            BrokerUnavailableError: Redis is unreachable, or rejects the connection.
            ConfigError: it is a node of a Redis Cluster, or a Sentinel.
        """
        try:
            with redis_errors(self._url):
                await self._client.ping()
                await refuse_cluster(self._client, self._url)
        except BaseException:
            await close_client(self._client)
            raise
        self._entered = True
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        """Disconnect."""
        self._entered = False
        await close_client(self._client)

    async def check(self) -> None:
        """Send PING to Redis.

        Raises:
            BrokerUnavailableError: Redis doesn't respond.
        """
        with redis_errors(self._url):
            await self._client.ping()

    async def publish(self, batch: Sequence[Message]) -> Sequence[Confirmation]:
        """Append the messages to their streams, in order.

        Raises:
            BrokerUnavailableError: the connection broke, Redis accepts no writes, or
                the publisher is not open. The next call reconnects.
        """
        if not self._entered:
            raise BrokerUnavailableError(
                "broker redis: the publisher is not open; use `async with`"
            )
        limit = self._max_payload_bytes
        answers: Answers[Confirmation] = Answers(
            batch, (nack_too_large(message.payload, limit) for message in batch)
        )
        if sent := answers.left:
            with redis_errors(self._url):
                results = await self._append([batch[i] for i in sent])
            for i, result in zip(sent, results, strict=True):
                refused = isinstance(result, Exception)
                answers.give(
                    i, Nacked(f"Redis refused it: {result}") if refused else Acked()
                )
        return answers.complete()

    async def _append(self, batch: Sequence[Message]) -> Sequence[Any]:
        pipeline = self._client.pipeline(transaction=True)
        for message in batch:
            pairs = (part for pair in to_fields(message).items() for part in pair)
            pipeline.execute_command("XADD", message.topic, *self._trim, "*", *pairs)
        try:
            return await pipeline.execute(raise_on_error=False)
        except NoPermissionError as error:
            if len(batch) == 1:
                return [error]
            # If the user may not write to one topic, messages to others must not be
            # charged an attempt.
            return [(await self._append([message]))[0] for message in batch]
