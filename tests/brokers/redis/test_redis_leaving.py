"""A replica that leaves its group in Redis loses no entries."""

import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from typing_extensions import override

from inbox.sources.redis import RedisSource
from outbox.cloudevents.fields import to_fields
from outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox import Message
from tests.fixtures.processes import ROOT
from tests.fixtures.redis import shared_source
from tests.fixtures.sources import entered, receive
from tests.servers.redis import RedisServer, redis_program

PAGE = (ROOT / "docs/brokers/redis.md").read_text()
RIGHTS = re.findall(r"ACL SETUSER billing on >password ~orders\.\* (.+)", PAGE)[
    0
].split()

source = partial(entered, RedisSource, "billing")
shared = partial(entered, shared_source, "billing")


def allowed(url: str, *rights: str) -> str:
    """Create a user with these rights, and return the URL for it."""
    with Redis.from_url(url) as client:
        client.execute_command("ACL SETUSER some on >some ~* " + " ".join(rights))
    return url.replace("://", "://some:some@")


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
        put(client, "a")
        put(client, "b")
    async with shared(allowed(url, "+@all -eval"), "a", "b") as leaving:
        assert len(await leaving.receive(limit=2)) == 2
    async with shared(url, "a", "b") as next_one:
        await receive(next_one, 2)


@pytest.mark.parametrize("command", ["xack", "xclaim", "xautoclaim", "xpending"])
async def test_a_missing_ack_permission_is_reported_at_start(
    private_redis: RedisServer, command: str
) -> None:
    url = allowed(private_redis.url, f"+@all -{command}")
    with pytest.raises(BrokerUnavailableError, match=f"permissions.*{command}"):
        async with shared(url, "orders"):
            pass


@pytest.mark.parametrize("missing", [right for right in RIGHTS if right != "+publish"])
async def test_to_keep_order_without_a_right_is_refused_at_start(
    private_redis: RedisServer, missing: str
) -> None:
    url = allowed(private_redis.url, *(right for right in RIGHTS if right != missing))
    with pytest.raises(ConfigError, match=f"needs {re.escape(' '.join(RIGHTS))};"):
        async with source(url, "orders", "bills*"):
            pass


class WithoutScripts(RedisServer):
    @override
    def command(self) -> Sequence[str]:
        return [*super().command(), "--rename-command", "EVAL", "NONE"]


async def test_a_server_without_scripts_is_refused_only_to_keep_order(
    tmp_path: Path,
) -> None:
    with WithoutScripts(redis_program(), tmp_path, {}).running() as server:
        with pytest.raises(ConfigError, match=r"EVAL.*order='none'"):
            async with source(server.url, "orders"):
                pass
        async with shared(server.url, "orders"):
            pass


async def test_a_replica_with_the_rights_of_the_page_takes_over(
    private_redis: RedisServer,
) -> None:
    url = allowed(private_redis.url, *RIGHTS)
    with Redis.from_url(private_redis.url) as client:
        for topic in ("bills", "orders"):
            put(client, topic)
    async with AsyncExitStack() as stack:
        async with source(url, "bills", "orders") as first:
            await receive(first, 2)
            second = await stack.enter_async_context(source(url, "bills", "orders"))
            assert not await second.receive(limit=2)
        for delivery in await receive(second, 2):
            await delivery.ack()


async def test_leaving_a_deleted_group_does_nothing(redis_url: str) -> None:
    with Redis.from_url(redis_url) as client:
        async with source(redis_url, "orders", "bills"):
            client.delete("orders")
        assert client.xinfo_consumers("bills", "billing") == []
