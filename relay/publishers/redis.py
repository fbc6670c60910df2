"""A publisher for Redis Streams: a topic maps to a stream, a message to its fields.

A batch is one MULTI … EXEC in one round trip: a server that is out of memory or has
become a replica accepts all of it or nothing, so order is preserved. Redis can refuse
a single entry only if the topic names a key that isn't a stream; later messages of the
same ordering key to other topics then overtake the refused one.

A topic can be published in shards, each a stream of its own. Consumers read the streams
of different layouts side by side. So before the first message of a lane is published,
all groups must have settled what the topic's other layouts hold at that moment.
"""

import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from typing import Any, Final, Self, TypeAlias

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, ResponseError

from pillarbox.outbox.bounded_dict import BoundedDict
from pillarbox.outbox.brokers.redis.connection import (
    close_client,
    redis_client,
    redis_errors,
    refuse_cluster,
)
from pillarbox.outbox.brokers.redis.options import LAYOUTS, RedisOptions
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.cloudevents.fields import to_fields
from pillarbox.outbox.cloudevents.raw_text import text_of
from pillarbox.outbox.errors import BrokerUnavailableError, shorten
from pillarbox.outbox.lane import lane_of
from pillarbox.outbox.message import Message
from pillarbox.outbox.url import without_password
from pillarbox.relay.answers import Answers
from pillarbox.relay.publisher import Acked, Confirmation, Nacked, nack_too_large

_PATIENCE: Final = 1000
_POSTPONED: Final = timedelta(seconds=1)
_SILENCE: Final = 10.0
"""Seconds after which another relay may have published to the same lane."""
_FIND_BEHIND: Final = """
-- Returns a stream's groups, those that have not settled what it held from one time to
-- another, and whether it still holds anything from then.
local key, since, until_then = KEYS[1], ARGV[1], ARGV[2]
if redis.call('EXISTS', key) == 0 then return {{}, {}, 0} end
local groups, behind = {}, {}
local last = redis.call('XREVRANGE', key, until_then, since, 'COUNT', 1)[1]
for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
  local name, read = group[2], group[8]
  groups[#groups + 1] = name
  if redis.call('XPENDING', key, name, since, until_then, 1)[1]
    or last and redis.call('XRANGE', key, '(' .. read, last[1], 'COUNT', 1)[1]
  then
    behind[#behind + 1] = name
  end
end
return {groups, behind, last and 1 or 0}
"""


_Line: TypeAlias = tuple[str, int]
"""A topic and a lane, which one relay at a time publishes."""


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
        self._shards = options.shards
        self._layouts = _Layouts(self._client, options.shards)

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
        answers: Answers[Confirmation] = Answers(batch, map(self._nack, batch))
        with redis_errors(self._url):
            lines = {i: _line(batch[i]) for i in answers.left}
            unready = await self._layouts.unready({*lines.values()})
            for i, line in lines.items():
                if line in unready:
                    answers.give(i, Nacked(unready[line], retry_after=_POSTPONED))
            if sent := answers.hold_back():
                results = await self._append([batch[i] for i in sent])
                for i, result in zip(sent, results, strict=True):
                    refused = isinstance(result, Exception)
                    answers.give(
                        i, Nacked(f"Redis refused it: {result}") if refused else Acked()
                    )
        return answers.complete()

    def _nack(self, message: Message) -> Nacked | None:
        if Shard.named(message.topic).of > 1:
            return Nacked(
                f"topic {shorten(message.topic)}: reserved for a shard of a topic",
                permanent=True,
            )
        return nack_too_large(message.payload, self._max_payload_bytes)

    async def _append(self, batch: Sequence[Message]) -> Any:
        # Not redis-py's own transaction, after which WAIT would run elsewhere.
        pipeline = self._client.pipeline(transaction=False)
        pipeline.execute_command("MULTI")
        for message in batch:
            pairs = (part for pair in to_fields(message).items() for part in pair)
            name = Shard.holding(message, self._shards).name
            pipeline.execute_command("XADD", name, *self._trim, "*", *pairs)
        pipeline.execute_command("EXEC")
        if self._replicas:
            pipeline.execute_command("WAIT", self._replicas, _PATIENCE)
        answers: Any = await pipeline.execute(raise_on_error=False)
        results = answers[len(batch) + 1]
        if isinstance(results, Exception):
            # The error that made Redis discard all, or that of EXEC itself.
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
                f"broker {without_password(self._url)}: only {replicas} of"
                f" {self._replicas} replicas have the batch after {_PATIENCE} ms"
            )


def _line(message: Message) -> _Line:
    return message.topic, lane_of(message.key, message.id, message.priority)


class _Layouts:
    """Tells when topics can be published in this many shards."""

    def __init__(self, client: Redis, shards: int) -> None:
        self._client = client
        self._shards = shards
        self._used: BoundedDict[_Line, float] = BoundedDict()
        self._waiting: dict[str, tuple[int, set[_Line]]] = {}

    async def unready(self, lines: Collection[_Line]) -> dict[_Line, str]:
        """Return the lines that have to wait, and what for."""
        now = time.monotonic()
        latest = now - _SILENCE
        new = {line for line in lines if self._used.get(line, latest) <= latest}
        unready = await self._look_at(new) if new else {}
        for line in lines:
            if line not in unready:
                self._used[line] = now
        return unready

    async def _look_at(self, lines: set[_Line]) -> dict[_Line, str]:
        topics: dict[str, set[_Line]] = {}
        for line in lines:
            topics.setdefault(line[0], set()).add(line)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.time()
        for topic in topics:
            pipeline.hgetall(topic + LAYOUTS)
        clock, *found = await pipeline.execute(raise_on_error=False)
        unready: dict[_Line, str] = {}
        for (topic, new), layouts in zip(topics.items(), found, strict=True):
            if isinstance(layouts, NoPermissionError) and self._shards == 1:
                continue  # this user has never published shards
            try:
                reason = await self._waits_for(topic, new, layouts, clock)
            except ResponseError as error:
                reason = str(error)
            if reason is not None:
                unready |= dict.fromkeys(new, f"shards={self._shards}: {reason}")
        return unready

    async def _waits_for(
        self, topic: str, new: set[_Line], layouts: Any, clock: Any
    ) -> str | None:
        for answer in (layouts, clock):
            if isinstance(answer, Exception):
                raise answer
        own = b"%d" % self._shards
        known = {b"1", own, *layouts}
        if known == {own}:
            return None
        moment, waiting = self._waiting.get(topic, (0, set()))
        if not new <= waiting:
            moment, waiting = clock[0] * 1000 + clock[1] // 1000, waiting | new
        self._waiting[topic] = moment, waiting
        shards = [shard for of in known for shard in Shard(topic, of=int(of)).all]
        pipeline = self._client.pipeline(transaction=False)
        for shard in shards:
            pipeline.eval(_FIND_BEHIND, 1, shard.name, layouts.get(own, 0), moment)
        found = dict(zip(shards, await pipeline.execute(), strict=True))
        groups = {group for there, *_ in found.values() for group in there}
        others = {
            shard.name: held
            for shard, held in found.items()
            if shard.of != self._shards
        }
        for name, (there, behind, is_filled) in others.items():
            for group in (*behind, *(groups.difference(there) if is_filled else ())):
                return (
                    f"waiting for group {text_of(group)} to settle its messages in"
                    f" {name}; if the group is no longer used, XGROUP DESTROY it there"
                    " and in the topic's other streams"
                )
        self._waiting.pop(topic, None)
        if own not in layouts or any(is_filled for *_, is_filled in others.values()):
            await self._client.hset(topic + LAYOUTS, own.decode(), str(moment))
        return None
