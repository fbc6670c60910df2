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

from pillarbox import Message
from pillarbox.inbox.sources.redis import RedisSource
from pillarbox.outbox.cloudevents.fields import to_fields
from pillarbox.outbox.errors import ConfigError
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


async def test_what_a_leaving_replica_has_read_goes_to_the_next_one(
    redis_url: str,
) -> None:
    with Redis.from_url(redis_url, protocol=2) as client:
        async with source(redis_url, "orders") as leaving:
            put(client, "orders")
            # As if the answer was lost.
            client.xreadgroup("billing", leaving._streams._member, {"orders": ">"})
        async with source(redis_url, "orders") as next_one:
            (delivery,) = await receive(next_one, 1)
            await delivery.ack()
        assert (delivery.message.payload, delivery.attempts) == (b"orders", 0)
        members: Any = client.xinfo_consumers("orders", "billing")
        assert [member["name"] for member in members] == [b"returned"]


@pytest.mark.parametrize(
    "missing", ["+eval", "+hkeys", "+xack", "+xclaim", "+xgroup", "+xpending"]
)
async def test_a_replica_that_shares_needs_these_rights_at_the_start(
    private_redis: RedisServer, missing: str
) -> None:
    url = allowed(private_redis.url, *(right for right in RIGHTS if right != missing))
    with pytest.raises(ConfigError, match=f"permissions.*{missing[1:]}.* rights &"):
        async with shared(url, "orders"):
            pass


@pytest.mark.parametrize("missing", [right for right in RIGHTS if right != "+publish"])
async def test_to_keep_order_without_a_right_is_refused_at_start(
    private_redis: RedisServer, missing: str
) -> None:
    url = allowed(private_redis.url, *(right for right in RIGHTS if right != missing))
    with pytest.raises(ConfigError, match=f"rights {re.escape(' '.join(RIGHTS))}$"):
        async with source(url, "orders", "bills*"):
            pass


class WithoutScripts(RedisServer):
    @override
    def command(self) -> Sequence[str]:
        return [*super().command(), "--rename-command", "EVAL", "NONE"]


async def test_a_server_without_scripts_is_refused(tmp_path: Path) -> None:
    with WithoutScripts(redis_program(), tmp_path, {}).running() as server:
        for kind in (source, shared):
            with pytest.raises(ConfigError, match=r"EVAL.*needs Redis 6\.2 or newer"):
                async with kind(server.url, "orders"):
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
