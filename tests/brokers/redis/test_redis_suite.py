"""The redis publisher and source pass the suites for every adapter."""

from collections.abc import Sequence
from datetime import timedelta

import pytest
from redis import Redis
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.sources.redis import RedisSource
from pillarbox.inbox.testing.source_suite import Capabilities as SourceCapabilities
from pillarbox.inbox.testing.source_suite import SourceSuite
from pillarbox.outbox.brokers.redis.options import LAYOUTS
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.cloudevents.fields import from_fields, to_fields
from pillarbox.relay.publishers.redis import RedisPublisher
from pillarbox.relay.testing.publisher_suite import Capabilities, PublisherSuite
from tests.fixtures.through_proxy import ProxiedUrl


class TestRedisPublisher(ProxiedUrl, PublisherSuite):
    server = "redis_url"
    capabilities = Capabilities()

    @override
    def publisher(self) -> RedisPublisher:
        limit = f"max_payload_bytes={self.max_payload_bytes}"
        return RedisPublisher(f"{self.url}?{limit}")

    @override
    async def received(self, topic: str, count: int) -> Sequence[Message]:
        with Redis.from_url(self.direct, protocol=2) as client:
            entries = client.xrange(topic)
        found = [from_fields(fields) for _, fields in entries]
        assert len({message.id for message in found}) >= count
        return found

    @override
    async def refused_message(self) -> Message:
        with Redis.from_url(self.direct) as client:
            client.set("taken", "x")
        return Message("taken", b"1")


class TestRedisSource(ProxiedUrl, SourceSuite):
    server = "redis_url"
    capabilities = SourceCapabilities(shares=False, one_receives=True, reads_ahead=True)
    hold = 4.0
    socket_timeout = 30

    @override
    def source(self, consumer: str, topic: str) -> RedisSource:
        return RedisSource(
            f"{self.url}?socket_timeout={self.socket_timeout}"
            f"&reclaim_after={self.hold}s",
            consumer=consumer,
            topics=[topic],
            poll_interval=timedelta(milliseconds=100),
            leave_timeout=timedelta(seconds=2),
        )

    @override
    def test_a_stall_is_reported_and_loses_nothing(self) -> None:
        self.socket_timeout = 3
        super().test_a_stall_is_reported_and_loses_nothing()

    @override
    async def put(self, *messages: Message) -> None:
        with Redis.from_url(self.direct, protocol=2) as client:
            for message in messages:
                client.xadd(message.topic, to_fields(message))

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        with Redis.from_url(self.direct, protocol=2) as client:
            client.xadd(topic, {"ce_data": payload})

    @override
    async def put_raw_header(self, topic: str, metadata: bytes) -> None:
        with Redis.from_url(self.direct, protocol=2) as client:
            client.xadd(topic, {"ce_data": b"1", "raw": metadata})

    @override
    async def put_raw_topic(self, topic: bytes) -> None:
        with Redis.from_url(self.direct, protocol=2) as client:
            client.xadd(topic, {"ce_data": b"1"})


@pytest.mark.variant
class TestSharedRedisSource(TestRedisSource):
    capabilities = SourceCapabilities(holds_back_keys=False)

    @override
    def source(self, consumer: str, topic: str) -> RedisSource:
        source = super().source(consumer, topic)
        source.abilities.share()
        return source


class TestShardedRedisSource(TestRedisSource):
    """The replicas share shards; each key is in one of them."""

    capabilities = SourceCapabilities()

    @override
    async def put(self, *messages: Message) -> None:
        with Redis.from_url(self.direct, protocol=2) as client:
            for message in messages:
                client.hsetnx(message.topic + LAYOUTS, "8", "0")
                client.xadd(Shard.holding(message, 8).name, to_fields(message))
