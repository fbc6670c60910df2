"""A replica that leaves its group in Redis loses no entries."""

from functools import partial
from typing import Any

import pytest
from redis import Redis

from inbox.sources.redis import RedisSource
from outbox.cloudevents.fields import to_fields
from outbox.errors import BrokerUnavailableError
from pillarbox import Message
from tests.fixtures.sources import entered, receive
from tests.servers.redis import RedisServer

source = partial(entered, RedisSource, "billing")


def put(client: Redis, topic: str) -> None:
    fields: Any = to_fields(Message(topic, topic.encode()))
    client.xadd(topic, fields)


async def test_messages_that_arrive_while_a_replica_leaves_go_to_the_next_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Redis.from_url(redis_url, protocol=2) as client:
        async with source(redis_url, "orders") as leaving:
            streams = leaving._streams
            check = streams._pending

            async def check_and_read(stream: bytes, member: str) -> Any:
                """Make a read by the leaving replica return right after its check."""
                found = await check(stream, member)
                if not found:
                    monkeypatch.undo()
                    put(client, "orders")
                    client.xreadgroup("billing", member, {stream: ">"})
                return found

            monkeypatch.setattr(streams, "_pending", check_and_read)
        pending: Any = client.xpending("orders", "billing")
        assert pending["pending"] == 1
        async with source(redis_url, "orders") as next_one:
            (delivery,) = await next_one.receive(limit=1)
            await delivery.ack()
        assert (delivery.message.payload, delivery.attempts) == (b"orders", 0)
        members: Any = client.xinfo_consumers("orders", "billing")
        assert [member["name"] for member in members] == [b"returned"]


async def test_a_source_that_may_not_leave_the_group_still_releases_its_entries(
    private_redis: RedisServer,
) -> None:
    url = private_redis.url
    with Redis.from_url(url) as client:
        client.execute_command("ACL SETUSER some on >some ~* +@all -eval")
        put(client, "a")
        put(client, "b")
    async with source(url.replace("://", "://some:some@"), "a", "b") as leaving:
        assert len(await leaving.receive(limit=2)) == 2
    async with source(url, "a", "b") as next_one:
        await receive(next_one, 2)


@pytest.mark.parametrize("command", ["xack", "xclaim", "xautoclaim", "xpending"])
async def test_a_missing_ack_permission_is_reported_at_start(
    private_redis: RedisServer, command: str
) -> None:
    url = private_redis.url
    with Redis.from_url(url) as client:
        client.execute_command(f"ACL SETUSER some on >some ~* +@all -{command}")

    with pytest.raises(BrokerUnavailableError, match=f"permissions.*{command}"):
        async with source(url.replace("://", "://some:some@"), "orders"):
            pass


async def test_leaving_a_deleted_group_does_nothing(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with source(redis_url, "orders", "bills"):
            client.delete("orders")
        assert client.xinfo_consumers("bills", "billing") == []
