"""The Redis publisher: full memory, missing privileges, size limits, and the URL."""

import pytest
from redis import Redis as SyncRedis

from pillarbox import Message
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers.redis import RedisPublisher
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


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis+sentinel://one,two", "write redis.sentinel://host:26379,"),
        ("redis+sentinel://one,two/main/x", "'x' is not the number of a Redis"),
        ("redis://one,two/main", "'main' is not the number of a Redis"),
        (
            "redis+sentinel://one/main?ssl_keyfile=x",
            "ssl_keyfile needs rediss.sentinel://",
        ),
        (
            "redis+sentinel://one/main?replicas=-1",
            "replicas='-1': write a whole number",
        ),
    ],
)
def test_a_url_of_sentinels_that_cannot_be_meant_is_refused(
    url: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        RedisPublisher(url)


def test_the_identity_is_of_the_sentinels_the_master_and_the_database() -> None:
    same = {
        "redis+sentinel://two,one:26379/main",
        "rediss+sentinel://user:secret@one,two/main/0?sentinel_password=hidden",
    }
    assert len({RedisPublisher(url).identity for url in same}) == 1
    other = "redis+sentinel://one,two/main/1"
    assert RedisPublisher(other).identity == "redis://one,two/main/1"


async def test_sentinels_that_are_away_are_named_without_their_secrets() -> None:
    port = free_port()
    url = f"redis+sentinel://me:secret@127.0.0.1:{port}/main?sentinel_password=hidden"
    with pytest.raises(BrokerUnavailableError) as raised:
        await RedisPublisher(url).__aenter__()
    assert str(raised.value) == (
        f"broker redis+sentinel://me@127.0.0.1:{port}/main can't be reached: no "
        "Sentinel names a master that is up"
    )


async def test_a_batch_that_too_few_replicas_have_counts_as_unpublished(
    redis_url: str,
) -> None:
    async with RedisPublisher(f"{redis_url}?replicas=1") as publisher:
        with pytest.raises(BrokerUnavailableError, match="0 of 1 replicas have"):
            await publisher.publish(numbered(1))
