"""A topic in shards on Redis: how it is published, and how layouts change."""

from typing import Any

import pytest
from redis import Redis

from outbox.brokers.shards import Shard
from outbox.cloudevents.fields import from_fields
from pillarbox import Message
from relay.publisher import Acked, Nacked
from relay.publishers import redis as publishing
from relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.sources import publish
from tests.servers.redis import RedisServer


def sharded(url: str, shards: int) -> str:
    return f"{url}?shards={shards}"


def shards(of: int, topic: str = "orders") -> list[str]:
    return [shard.name for shard in Shard(topic, of=of).all]


def numbers(client: Any, name: str) -> list[int]:
    return [int(from_fields(fields).payload) for _, fields in client.xrange(name)]


def read(client: Any, group: str, *names: str) -> list[tuple[str, bytes]]:
    """Read everything new as a group, and create it first; return what was read."""
    for name in names:
        if not any(g["name"] == group.encode() for g in groups_of(client, name)):
            client.xgroup_create(name, group, id="0", mkstream=True)
    answer = client.xreadgroup(group, "one", dict.fromkeys(names, ">"))
    return [(stream.decode(), id) for stream, found in answer for id, _ in found]


def groups_of(client: Any, name: str) -> Any:
    return client.xinfo_groups(name) if client.exists(name) else []


def settle(client: Any, group: str, found: list[tuple[str, bytes]]) -> None:
    for name, id in found:
        client.xack(name, group, id)


async def test_each_key_is_published_in_order_to_one_shard(redis_url: str) -> None:
    messages = numbered(80, keys=16)
    await publish(sharded(redis_url, 8), *messages)
    with Redis.from_url(redis_url, protocol=2) as client:
        found = {name: numbers(client, name) for name in shards(8)}
        assert not client.exists("orders")
    expected: dict[str, list[int]] = {name: [] for name in shards(8)}
    for number, message in enumerate(messages):
        expected[Shard.holding(message, 8).name].append(number)
    assert found == expected
    assert len([name for name, held in found.items() if held]) > 1


@pytest.mark.parametrize(("before", "after"), [(1, 8), (8, 1), (8, 3)])
async def test_another_layout_waits_until_groups_have_settled_what_the_last_one_held(
    redis_url: str, before: int, after: int
) -> None:
    await publish(sharded(redis_url, before), *numbered(10, keys=10))
    with Redis.from_url(redis_url, protocol=2) as client:
        held = {name: read(client, "billing", name) for name in shards(before)}
        *settled, last = (entry for found in held.values() for entry in found)
        settle(client, "billing", settled)
        async with RedisPublisher(sharded(redis_url, after)) as publisher:
            (answer,) = await publisher.publish(numbered(1))
            assert isinstance(answer, Nacked)
            assert answer.retry_after is not None
            assert f"group billing has settled what {last[0]} held" in answer.reason
            # What comes later is another relay's, with keys of its own.
            async with RedisPublisher(sharded(redis_url, before)) as other:
                assert await other.publish(numbered(1)) == [Acked()]
            settle(client, "billing", [last])
            assert await publisher.publish(numbered(1)) == [Acked()]
        assert sum(len(numbers(client, name)) for name in shards(after)) == 1


async def test_a_group_that_has_not_found_a_shard_yet_is_waited_for(
    redis_url: str,
) -> None:
    with Redis.from_url(redis_url, protocol=2) as client:
        await publish(redis_url, *numbered(1))
        settle(client, "billing", read(client, "billing", "orders"))
        await publish(sharded(redis_url, 2), *numbered(1))
        async with RedisPublisher(redis_url) as publisher:
            (answer,) = await publisher.publish(numbered(1))
            assert "group billing has settled what orders.shard-" in str(answer)
            settle(client, "billing", read(client, "billing", *shards(2)))
            assert await publisher.publish(numbered(1)) == [Acked()]


async def test_a_message_behind_a_postponed_one_of_its_key_is_postponed_too(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(1))
    with Redis.from_url(redis_url, protocol=2) as client:
        read(client, "billing", "orders")
        batch = [Message("orders", b"1", key="k"), Message("bills", b"2", key="k")]
        async with RedisPublisher(sharded(redis_url, 2)) as publisher:
            answers = await publisher.publish(batch)
        assert [type(answer) for answer in answers] == [Nacked, Nacked]
        assert sum(client.xlen(name) for name in shards(2, "bills")) == 0


async def test_a_group_that_is_new_since_the_change_holds_up_no_relay(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(3))
    await publish(sharded(redis_url, 2), *numbered(3))
    with Redis.from_url(redis_url, protocol=2) as client:
        client.xgroup_create("orders", "analytics", id="0")
        await publish(sharded(redis_url, 2), *numbered(3))


async def test_what_a_relay_published_to_the_last_layout_since_is_waited_for(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one does that has not noticed yet that the layout changes."""
    first, other = (Message("orders", b"1", key=key) for key in ("a", "d"))
    with Redis.from_url(redis_url, protocol=2) as client:
        async with (
            RedisPublisher(redis_url) as old,
            RedisPublisher(sharded(redis_url, 2)) as new,
        ):
            assert await old.publish([other]) == [Acked()]
            settle(client, "billing", read(client, "billing", "orders"))
            assert await new.publish([first]) == [Acked()]
            assert await old.publish([other]) == [Acked()]
            (answer,) = await new.publish([other])
            assert "group billing has settled what orders held" in str(answer)
            assert await new.publish([first]) == [Acked()]
            monkeypatch.setattr(publishing, "_SILENCE", 0.0)
            assert await new.publish([first]) != [Acked()]


async def test_a_relay_without_shards_needs_no_rights_for_them(
    private_redis: RedisServer,
) -> None:
    rights = "on >some ~orders +multi +exec +xadd +ping"
    with Redis.from_url(private_redis.url) as client:
        client.execute_command(f"ACL SETUSER some {rights}")
    url = private_redis.url.replace("://", "://some:some@")
    await publish(url, *numbered(1))
    async with RedisPublisher(sharded(url, 2)) as publisher:
        (answer,) = await publisher.publish(numbered(1))
    assert isinstance(answer, Nacked)
    assert answer.retry_after is not None
    assert "permission" in answer.reason


async def test_a_topic_named_like_a_shard_is_refused(redis_url: str) -> None:
    async with RedisPublisher(redis_url) as publisher:
        (answer,) = await publisher.publish([Message("orders.shard-1-of-2", b"1")])
    assert isinstance(answer, Nacked)
    assert answer.permanent
