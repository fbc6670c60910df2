"""A topic in shards on Redis: how it is published, and how replicas share it."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from pillarbox import Message
from pillarbox.inbox.consuming import backlog
from pillarbox.inbox.source import Source
from pillarbox.inbox.sources.redis import RedisSource
from pillarbox.inbox.sources.redis import streams as reading
from pillarbox.outbox.brokers.shards import Shard
from pillarbox.outbox.cloudevents.fields import from_fields
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.outbox.gather import end
from pillarbox.relay.publisher import Acked, Nacked
from pillarbox.relay.publishers import redis as publishing
from pillarbox.relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.redis import shared_source
from tests.fixtures.sources import entered, payloads, publish, receive
from tests.fixtures.waiting import wait_for
from tests.servers.redis import RedisServer

source = partial(entered, RedisSource, "billing")
shared = partial(entered, shared_source, "billing")


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
            assert f"group billing to settle its messages in {last[0]}" in answer.reason
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
            assert "group billing to settle its messages in orders.shard-" in str(
                answer
            )
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
            assert "group billing to settle its messages in orders" in str(answer)
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


async def handle(source: Source, numbers: list[int]) -> None:
    """Handle what arrives, and note the numbers."""
    while True:
        for delivery in await source.receive(limit=10):
            assert delivery.message.topic == "orders"
            numbers.append(int(delivery.message.payload))
            await delivery.ack()


async def until(holds: Callable[[], bool]) -> float:
    """Wait for a condition; return after how many seconds it holds."""
    began = time.monotonic()
    await asyncio.to_thread(wait_for, "it holds", holds)
    return time.monotonic() - began


def reads(*sources: RedisSource) -> list[int]:
    """Return how many shards each replica reads."""
    return [8 - len({*s.abilities.standing_by()} - {"orders"}) for s in sources]


@pytest.mark.parametrize("topic", ["orders", "ord*"])
async def test_a_running_consumer_finds_shards_and_sees_the_topic(
    redis_url: str, topic: str
) -> None:
    await publish(redis_url, Message("orders", b"0"))
    async with source(redis_url, topic) as consumer:
        (delivery,) = await receive(consumer, 1)
        await delivery.ack()
        await until(lambda: not consumer._keeper.held)
        await publish(sharded(redis_url, 3), *numbered(20, keys=20))
        began = time.monotonic()
        found = await receive(consumer, 20)
        assert time.monotonic() - began < 1.5
    assert sorted(payloads(found)) == list(range(20))
    assert {delivery.message.topic for delivery in found} == {"orders"}


async def test_a_prefix_matches_topics_and_not_the_names_of_shards(
    redis_url: str,
) -> None:
    await publish(sharded(redis_url, 2), *numbered(4, keys=4))
    await publish(sharded(redis_url, 2), *numbered(1, topic="orders.paid"))
    async with source(redis_url, "orders.*") as consumer:
        (found,) = await receive(consumer, 1)
        assert not await consumer.receive(limit=10)
    assert found.message.topic == "orders.paid"


async def test_an_unreadable_entry_of_a_shard_has_its_topic(redis_url: str) -> None:
    await publish(sharded(redis_url, 2), *numbered(1))
    with Redis.from_url(redis_url) as client:
        client.xadd("orders.shard-1-of-2", {"ce_data": b"1"})
    async with source(redis_url, "orders") as consumer:
        assert {d.message.topic for d in await receive(consumer, 2)} == {"orders"}


async def test_replicas_share_shards_evenly_and_take_over_at_once(
    redis_url: str,
) -> None:
    await publish(sharded(redis_url, 8), *numbered(8, keys=8))
    handled: list[list[int]] = [[], [], []]
    async with AsyncExitStack() as stack:
        replicas: list[RedisSource] = []
        tasks: list[asyncio.Task[None]] = []
        for numbers in handled:
            replica = await stack.enter_async_context(source(redis_url, "orders"))
            replicas.append(replica)
            tasks.append(asyncio.create_task(handle(replica, numbers)))
            stack.push_async_callback(end, [tasks[-1]])
        await until(lambda: reads(*replicas) == [3, 3, 2])
        await publish(sharded(redis_url, 8), *numbered(400, keys=80))
        await until(lambda: sum(map(len, handled)) >= 408)
        assert all(len(numbers) > 50 for numbers in handled)

        await end([tasks[0]])
        await replicas[0].__aexit__()
        assert await until(lambda: reads(*replicas[1:]) == [4, 4]) < 0.9
        # Like a killed one, it does nothing more, and its subscription ends.
        await end([tasks[1]])
        await replicas[1]._streams.end()
        assert await until(lambda: reads(replicas[2]) == [8]) < 2
    assert sorted(n for numbers in handled for n in numbers) == sorted(
        [*range(8), *range(400)]
    )


async def test_a_shard_moves_when_what_its_reader_holds_is_settled(
    redis_url: str,
) -> None:
    await publish(sharded(redis_url, 2), *numbered(20, keys=20))
    async with source(redis_url, "orders") as first:
        held = await receive(first, 20)
        async with source(redis_url, "orders") as second:
            assert not await second.receive(limit=20)
            await publish(sharded(redis_url, 2), *numbered(20, keys=20))
            for delivery in held:
                await delivery.ack()
            came = await receive(second, 1)
            assert await first.receive(limit=20)
    names = {Shard.holding(delivery.message, 2).number for delivery in came}
    assert names == {2}


async def test_a_shard_moves_without_what_its_reader_has_read_ahead(
    redis_url: str,
) -> None:
    await publish(sharded(redis_url, 2), *numbered(500, keys=20))
    async with source(redis_url, "orders") as first:
        held = await receive(first, 20, limit=20)
        held += await receive(first, 20, limit=20)
        while len(first._keeper.held) < 500:
            held += await first.receive(limit=1)
        began = time.monotonic()
        async with source(redis_url, "orders") as second:
            assert not await second.receive(limit=20)
            for delivery in held:
                await delivery.ack()
            first._ahead_at = 0.0  # else it reads after 50 ms
            for delivery in await first.receive(limit=1):
                held.append(delivery)
                await delivery.ack()
            came = await receive(second, 1)
            assert time.monotonic() - began < 5
    names = {Shard.holding(delivery.message, 2).number for delivery in came}
    assert names == {2}
    moved = [n for n in range(500) if n in payloads(came)]
    assert payloads(came) == moved
    assert not {*payloads(came)} & {*payloads(held)}


async def test_what_is_read_ahead_from_many_shards_is_as_limited_as_from_one(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "READ_AHEAD", 100)
    await publish(sharded(redis_url, 64), *numbered(2000, keys=1000))
    async with source(redis_url, "orders") as consumer:
        received = await receive(consumer, 20, limit=1)
        assert len(consumer._keeper.held) - len(received) <= 200


async def test_an_entry_is_delivered_although_the_subscription_was_lost_in_its_read(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with source(redis_url, "bills", "orders") as consumer:
        await publish(redis_url, Message("bills", b"1"))
        streams = consumer._streams
        take, show = reading._answers, streams._presence.show

        async def lose(pipeline: Any) -> list[Any]:
            answers = await take(pipeline)
            at = next(
                i for i, answer in enumerate(answers) if answer[2:] == [[], b"0-0"]
            )
            answers[at] = [streams._channel.encode(), 0]
            return answers

        async def fail(_: str) -> None:
            monkeypatch.setattr(reading, "_answers", take)
            monkeypatch.setattr(streams._presence, "show", show)
            raise RedisConnectionError

        monkeypatch.setattr(reading, "_answers", lose)
        monkeypatch.setattr(streams._presence, "show", fail)
        with pytest.raises(BrokerUnavailableError):
            await consumer.receive(limit=1)
        assert payloads(await receive(consumer, 1)) == [1]


async def test_a_shard_moves_after_a_time_whatever_its_reader_holds(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_HANDOVER", 0.5)
    await publish(sharded(redis_url, 2), *numbered(20, keys=20))
    async with source(redis_url, "orders", reclaim_after="1s") as first:
        held = await receive(first, 20)
        async with source(redis_url, "orders", reclaim_after="1s") as second:
            again = await receive(second, 1)
            moved = [d for d in held if Shard.holding(d.message, 2).number == 2]
            assert payloads(again) == payloads(moved)
            # The first one notices that at its next heartbeat.
            await until(lambda: len(first._keeper.held) == len(held) - len(moved))


async def test_what_other_programs_claim_of_a_shard_moves_no_other_shard(
    redis_url: str,
) -> None:
    await publish(sharded(redis_url, 2), *numbered(20, keys=20))
    async with source(redis_url, "orders", reclaim_after="1s") as replica:
        held = await receive(replica, 20)
        with Redis.from_url(redis_url, protocol=2) as client:
            ((id, _), *_) = client.xrange("orders.shard-1-of-2")
            client.xclaim("orders.shard-1-of-2", "billing", "other", 0, [id])
        kept = [d for d in held if Shard.holding(d.message, 2).number == 2]
        await until(lambda: len(replica._keeper.held) == len(kept))


@pytest.mark.parametrize("kind", [source, shared])
async def test_a_consumer_without_a_stream_yet_waits_between_its_searches(
    redis_url: str, kind: Any
) -> None:
    with Redis.from_url(redis_url) as client:
        async with kind(redis_url, "orders.*") as consumer:
            before: Any = client.info("commandstats")
            for _ in range(10):
                assert not await consumer.receive(limit=1)
            after: Any = client.info("commandstats")
    scans = [stats["cmdstat_scan"]["calls"] for stats in (before, after)]
    assert scans[1] - scans[0] <= 1
