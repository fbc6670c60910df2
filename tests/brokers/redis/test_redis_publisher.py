"""The Redis publisher: full memory, missing privileges, size limits, and the URL."""

import pytest
from redis import Redis as SyncRedis

from outbox.errors import BrokerUnavailableError
from pillarbox import Message
from relay.publisher import Acked, Nacked
from relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import numbered
from tests.servers.redis import RedisServer


async def test_a_full_redis_accepts_all_of_a_batch_or_nothing(
    private_redis: RedisServer,
) -> None:
    with SyncRedis.from_url(private_redis.url) as client:
        client.config_set("maxmemory", "1")
        async with RedisPublisher(private_redis.url) as publisher:
            with pytest.raises(BrokerUnavailableError, match="used memory"):
                await publisher.publish(numbered(3))
            assert client.xlen("orders") == 0
            client.config_set("maxmemory", "0")
            assert await publisher.publish(numbered(3)) == [Acked()] * 3


async def test_a_topic_that_is_not_a_stream_is_nacked_and_others_are_not(
    redis_url: str,
) -> None:
    with SyncRedis.from_url(redis_url) as client:
        client.set("taken", "x")
    async with RedisPublisher(redis_url) as publisher:
        first, second, third = await publisher.publish(
            [Message("orders", b""), Message("taken", b""), Message("orders", b"")]
        )
    assert first == third == Acked()
    assert isinstance(second, Nacked)
    assert "WRONGTYPE" in second.reason


async def test_a_topic_without_write_permission_is_nacked_alone(
    private_redis: RedisServer,
) -> None:
    with SyncRedis.from_url(private_redis.url) as client:
        client.execute_command("ACL", "SETUSER", "default", "resetkeys", "~orders")
        async with RedisPublisher(private_redis.url) as publisher:
            first, second = await publisher.publish(
                [Message("secret", b""), Message("orders", b"")]
            )
    assert isinstance(first, Nacked)
    assert not first.permanent
    assert second == Acked()


async def test_streams_are_trimmed_to_about_the_length_in_the_url(
    redis_url: str,
) -> None:
    async with RedisPublisher(f"{redis_url}?maxlen=100") as publisher:
        await publisher.publish(numbered(1000))
    with SyncRedis.from_url(redis_url) as client:
        assert 100 <= int(str(client.xlen("orders"))) < 300
