"""A publisher for Redis Streams: a topic maps to a stream, a message to its fields.

A batch is one MULTI … EXEC in one round trip: a server that is out of memory or has
become a replica accepts all of it or nothing, so order is preserved. Redis can refuse
a single entry only if the topic names a key that isn't a stream; later messages of the
same ordering key to other topics then overtake the refused one.
"""

from collections.abc import Sequence
from typing import Any, Final, Self

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
from outbox.url import without_password
from relay.answers import Answers
from relay.publisher import Acked, Confirmation, Nacked, nack_too_large

_PATIENCE: Final = 1000


class RedisPublisher:
    """Publishes with XADD.

    Args:
        url: `redis://host:port/db`, `rediss://…`, or
            `redis+sentinel://host,host/master/db`, with the options of `RedisOptions`.

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
        self._replicas = options.replicas
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
            BrokerUnavailableError: the connection broke, Redis accepts no writes, too
                few replicas have them, or the publisher is not open. The next call
                reconnects.
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

    async def _append(self, batch: Sequence[Message]) -> Any:
        # Not redis-py's own transaction, after which WAIT would run elsewhere.
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("MULTI")
        for message in batch:
            pairs = (part for pair in to_fields(message).items() for part in pair)
            pipeline.execute_command("XADD", message.topic, *self._trim, "*", *pairs)
        pipeline.execute_command("EXEC")
        if self._replicas:
            pipeline.execute_command("WAIT", self._replicas, _PATIENCE)
        answers: Any = await pipeline.execute(raise_on_error=False)
        results = answers[len(batch) + 1]
        if isinstance(results, Exception):
            # What made Redis discard all; or it refused EXEC itself.
            error = next(each for each in answers if isinstance(each, Exception))
            if not isinstance(error, NoPermissionError):
                raise error
            if len(batch) == 1:
                return [error]
            # If the user may not write to one topic, messages to others must not be
            # charged an attempt.
            return [(await self._append([message]))[0] for message in batch]
        if self._replicas:
            await self._require(answers[-1])
        return results

    async def _require(self, replicas: Any) -> None:
        if isinstance(replicas, Exception):
            raise replicas
        if replicas < self._replicas:
            # The server may have been replaced: the next connection asks who is master.
            await self._client.connection_pool.disconnect(inuse_connections=False)
            raise BrokerUnavailableError(
                f"broker {without_password(self._url)}: {replicas} of "
                f"{self._replicas} replicas have the batch after {_PATIENCE} ms"
            )
