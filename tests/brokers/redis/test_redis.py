"""Redis Streams: all published messages arrive."""

import asyncio
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis as SyncRedis
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from typing_extensions import override

from pillarbox import Message
from pillarbox.inbox.consuming.backlog import READ_AHEAD
from pillarbox.inbox.poison.history import TakenOver
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.redis import RedisSource, streams
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import numbered
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.redis import shared_source
from tests.fixtures.sources import (
    entered,
    payloads,
    publish,
    receive,
    receive_despite_losses,
)
from tests.fixtures.waiting import answer_after
from tests.servers.redis import RedisServer, redis_program, redis_server

SOON = timedelta(milliseconds=50)


source = partial(entered, RedisSource, "billing")
shared = partial(entered, shared_source, "billing")


def pending(url: str) -> Any:
    with SyncRedis.from_url(url, protocol=2) as client:
        return client.xpending("orders", "billing")["pending"]


def held_by(url: str) -> dict[str, int]:
    """Return how many entries the members of the group hold."""
    with SyncRedis.from_url(url, protocol=2) as client:
        members: Any = client.xinfo_consumers("orders", "billing")
    held = {member["name"].decode(): member["pending"] for member in members}
    return {name: count for name, count in held.items() if count}


class Sentinel(RedisServer):
    @override
    def command(self) -> Sequence[str]:
        settings = self.directory / "sentinel.conf"
        settings.write_text(f"port {self.port}\nbind 127.0.0.1\ndir {self.directory}\n")
        return [redis_program(), str(settings), "--sentinel"]


async def test_a_redis_cluster_and_a_sentinel_are_refused_at_the_start(
    tmp_path: Path,
) -> None:
    with (
        # Otherwise, it is 10,000 above the server's, where clients have theirs.
        redis_server(
            {"cluster-enabled": "yes", "cluster-port": str(free_port())}
        ) as cluster,
        Sentinel(redis_program(), tmp_path, {}).running() as sentinel,
    ):
        for server, mode in ((cluster, "cluster"), (sentinel, "sentinel")):
            for adapter in (
                RedisPublisher(server.url),
                RedisSource(server.url, consumer="billing", topics=["orders"]),
            ):
                with pytest.raises(ConfigError, match=f"runs in {mode} mode, which"):
                    await adapter.__aenter__()


async def test_the_limit_holds_over_several_streams(redis_url: str) -> None:
    for topic in ("a", "b", "c"):
        await publish(redis_url, *numbered(5, topic=topic))
    async with source(redis_url, "a", "b", "c") as consumer:
        assert [len(await consumer.receive(limit=4)) for _ in range(4)] == [4, 4, 4, 3]


async def test_streams_are_found_by_prefix(redis_url: str) -> None:
    await publish(redis_url, Message("a[1].x", b"1"), Message("a1.x", b"2"))
    async with source(redis_url, "a[1].*") as consumer:
        assert payloads(await receive(consumer, 1)) == [1]
        assert await consumer.receive(limit=10) == []


async def test_unacked_messages_go_to_the_next_consumer_at_once(redis_url: str) -> None:
    await publish(redis_url, *numbered(4))
    async with source(redis_url, "orders") as consumer:
        deliveries = await receive(consumer, 4)
        await deliveries[0].ack()
        await deliveries[2].nack(timedelta(hours=1))
        await deliveries[3].nack()
    async with source(redis_url, "orders") as consumer:
        again = await receive(consumer, 3)
    attempts = {int(d.message.payload): d.attempts for d in again}
    assert attempts == {1: 0, 2: 1, 3: 0}


async def test_deliveries_of_a_dead_replica_are_taken_over(redis_url: str) -> None:
    await publish(redis_url, *numbered(3))
    async with Redis.from_url(redis_url, protocol=2) as client:
        async with source(redis_url, "orders"):
            pass  # creates the group
        await client.xreadgroup("billing", "dead", {"orders": ">"})
    async with source(
        redis_url, "orders", reclaim_after=timedelta(seconds=1)
    ) as consumer:
        deliveries = await receive(consumer, 3)
    assert sorted(payloads(deliveries)) == [0, 1, 2]
    assert {delivery.attempts for delivery in deliveries} == {0}
    # What it had only read ahead is not suspect, however much that was.
    (history,) = {delivery.history for delivery in deliveries}
    assert isinstance(history, TakenOver)


async def test_a_heartbeat_of_many_entries_lets_other_commands_in(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(1200))
    async with (
        source(redis_url, "orders") as consumer,
        Redis.from_url(redis_url, protocol=2) as client,
    ):
        await receive(consumer, 1200)
        ids = [entry.at for entry in consumer._keeper.held.values()]
        before = (await client.info("commandstats"))["cmdstat_eval"]["calls"]
        lost = streams.EntryId(b"orders", b"1-1")
        assert await consumer._streams.keep_alive([*ids, lost]) == {lost: False}
        after = (await client.info("commandstats"))["cmdstat_eval"]["calls"]
        assert after - before >= 3
        (entries,) = await client.xinfo_consumers("orders", "billing")
        assert entries["pending"] == 1200


async def test_deliveries_of_live_replicas_do_not_hide_those_of_a_dead_one(
    redis_url: str,
) -> None:
    async with source(
        redis_url, "orders", reclaim_after=timedelta(seconds=3)
    ) as living:
        await publish(redis_url, *numbered(50))
        held = await receive(living, 50)
        await publish(redis_url, Message("orders", b"50"))
        async with Redis.from_url(redis_url, protocol=2) as client:
            await client.xreadgroup("billing", "dead", {"orders": ">"})
        found = await receive(living, 1)
        assert payloads(found) == [50]
        for delivery in held + found:
            await delivery.ack()
    assert pending(redis_url) == 0


async def test_a_replica_that_freezes_right_before_a_read_reads_nothing_when_it_wakes(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await publish(redis_url, *numbered(2))
    soon = timedelta(milliseconds=500)
    async with source(redis_url, "orders", reclaim_after=soon) as frozen:
        held = await receive(frozen, 2)
        is_frozen, wakes = asyncio.Event(), asyncio.Event()
        send = streams._answers

        async def freeze(pipeline: Any) -> Any:
            if asyncio.current_task() is reading:
                is_frozen.set()
                await wakes.wait()
            return await send(pipeline)

        async def be_frozen(_: Any) -> Any:
            await wakes.wait()
            return {}

        monkeypatch.setattr(streams, "_answers", freeze)
        monkeypatch.setattr(frozen._streams, "keep_alive", be_frozen)
        reading = asyncio.create_task(frozen.receive(limit=10))
        await is_frozen.wait()
        async with source(redis_url, "orders", reclaim_after=soon) as other:
            again = await receive(other, 2)
            await publish(redis_url, *numbered(4)[2:])
            for delivery in again:
                await delivery.ack()
            later = await receive(other, 2)
            await publish(redis_url, *numbered(5)[4:])
            wakes.set()
            assert await reading == []
            assert set(frozen.abilities.standing_by()) == {"orders"}
            for delivery in (*held, *later):
                await delivery.ack()
    assert payloads(again + later) == [0, 1, 2, 3]


async def test_what_a_read_found_whose_answer_was_lost_comes_before_anything_newer(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = streams._answers

    async def lose(pipeline: Any) -> Any:
        await send(pipeline)
        monkeypatch.undo()
        raise RedisConnectionError

    async with source(redis_url, "orders") as consumer:
        await publish(redis_url, *numbered(2))
        held = await receive(consumer, 1, limit=1)
        await publish(redis_url, *numbered(4)[2:])
        monkeypatch.setattr(streams, "_answers", lose)
        with pytest.raises(BrokerUnavailableError):
            await consumer.receive(limit=1)
        rest = await receive(consumer, 3, limit=1)
        assert payloads(held + rest) == [0, 1, 2, 3]
        for delivery in held + rest:
            await delivery.ack()
    assert pending(redis_url) == 0


async def test_a_member_subscribes_again_whose_subscription_fell_silent(
    private_redis: RedisServer, redis_url: str, proxy: MakeProxy
) -> None:
    server, url = proxy(private_redis.url)
    await publish(redis_url, *numbered(1))
    async with source(url, "orders", socket_timeout=1) as consumer:
        # As if a frozen master had been replaced: its connections stay open.
        server.divert(urlsplit(redis_url).port or 0, answers=False)
        assert payloads(await receive_despite_losses(consumer, 1)) == [0]


async def test_two_replicas_never_stand_by_for_each_other(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = streams._answers

    async def lose(pipeline: Any) -> Any:
        await send(pipeline)
        monkeypatch.undo()
        raise RedisConnectionError

    async with (
        source(redis_url, "orders") as older,
        source(redis_url, "orders") as younger,
    ):
        await publish(redis_url, *numbered(2))
        await older._streams._presence.end()
        monkeypatch.setattr(streams, "_answers", lose)
        with pytest.raises(BrokerUnavailableError):
            await younger.receive(limit=1)
        await older._streams._presence.show(older._streams._channel)
        # The younger one has got an entry, and doesn't know that.
        assert await older.receive(limit=2) == []
        monkeypatch.setattr(streams, "_HANDOVER", 0.5)
        assert payloads(await receive(older, 2)) == [0, 1]


async def test_a_replica_that_lost_an_entry_gives_up_the_later_ones(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(3))
    soon = timedelta(milliseconds=300)
    async with source(redis_url, "orders", reclaim_after=soon) as loser:
        await receive(loser, 3)
        with SyncRedis.from_url(redis_url, protocol=2) as client:
            ((first, _), *_) = client.xrange("orders")
            client.xclaim("orders", "billing", "other", 0, [first])
            while held_by(redis_url) != {"other": 1, "returned": 2}:
                client.xclaim("orders", "billing", "other", 0, [first])
                assert not await loser.receive(limit=3)
            client.xack("orders", "billing", first)
        assert payloads(await receive(loser, 2)) == [1, 2]


async def test_a_message_that_waits_for_a_retry_stays_first_when_its_replica_is_killed(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(3))
    async with source(redis_url, "orders") as second:
        async with source(redis_url, "orders") as first:
            pass
        for delivery in await receive(second, 3):
            await delivery.nack(timedelta(hours=1))
        await second._streams.end()
        async with source(redis_url, "orders") as first:
            assert payloads(await receive(first, 3)) == [0, 1, 2]


async def test_a_source_can_be_left_at_any_moment_of_its_heartbeat(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(1))
    after = timedelta(milliseconds=6)
    for moment in range(60):
        async with asyncio.timeout(60):
            async with source(redis_url, "orders", reclaim_after=after) as consumer:
                await receive(consumer, 1)
                await answer_after(0.002 + moment * 0.00005)


async def test_a_heartbeat_takes_nothing_back_that_was_handed_back(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(1))
    async with shared(redis_url, "orders") as consumer:
        (delivery,) = await receive(consumer, 1)
        (at,) = consumer._keeper.held.values()
        await delivery.hand_back(timedelta(seconds=30))
        while held_by(redis_url) != {"returned": 1}:
            await answer_after(0.01)
        assert await consumer._streams.keep_alive([at.at]) == {at.at: True}
        assert held_by(redis_url) == {"returned": 1}


async def test_a_replica_that_has_read_far_ahead_leaves_topics_to_others(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(READ_AHEAD + 100))
    async with source(redis_url, "orders") as old:
        deliveries: list[Delivery] = []
        while sum(held_by(redis_url).values()) <= READ_AHEAD:
            deliveries += await old.receive(limit=1)
        async with source(redis_url, "orders") as new:
            assert await deliveries[0].hand_back(timedelta(seconds=30))
            while not old.abilities.standing_by():
                await old.receive(limit=100)
            assert payloads(await receive(new, 1))[0] == 0


async def test_what_another_replica_has_settled_is_not_delivered_again(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(2))
    after = timedelta(milliseconds=60)
    async with source(redis_url, "orders", reclaim_after=after) as consumer:
        one, other = await receive(consumer, 2)
        with SyncRedis.from_url(redis_url) as client:
            for id, _ in client.xrange("orders"):
                client.xack("orders", "billing", id)
        await answer_after(1)
        await one.nack()
        await other.nack(SOON)
        for _ in range(5):
            assert not await consumer.receive(limit=2)


async def test_messages_are_handed_back_also_behind_all_that_is_read_ahead(
    redis_url: str,
) -> None:
    for _ in range(21):
        await publish(redis_url, *numbered(500))
    async with source(redis_url, "orders") as consumer:
        received = await receive(consumer, 1, limit=1)
        while len(consumer._keeper.held) < READ_AHEAD + 10:
            received += await consumer.receive(limit=1)
        for delivery in received:
            assert await delivery.hand_back(timedelta(seconds=30))


async def test_attempts_are_known_to_the_replica_for_which_another_steps_aside(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(2))
    async with source(redis_url, "orders") as consumer:
        (failed, _) = await receive(consumer, 2)
        await failed.nack(SOON)
    async with source(redis_url, "orders") as old, source(redis_url, "orders") as new:
        received = await receive(old, 2)
        for delivery in received:
            assert await delivery.hand_back(timedelta(seconds=30))
        assert not await old.receive(limit=2)
        received += await receive(new, 2)
    assert [delivery.attempts for delivery in received] == [1, 0, 1, 0]


async def test_a_group_deleted_while_an_entry_is_handed_back_is_created_again(
    redis_url: str,
) -> None:
    await publish(redis_url, *numbered(1))
    async with source(redis_url, "orders") as consumer:
        (delivery,) = await receive(consumer, 1)
        with SyncRedis.from_url(redis_url) as client:
            client.delete("orders")
        await delivery.hand_back(timedelta(seconds=1))
        # Long enough for the attempts after which nothing is fetched before a success.
        await answer_after(3)
        await publish(redis_url, *numbered(1))
        assert payloads(await receive_despite_losses(consumer, 1)) == [0]


async def test_a_deleted_group_ends_no_heartbeats_for_other_streams(
    redis_url: str,
) -> None:
    after = timedelta(seconds=2)
    async with source(redis_url, "bills", "orders", reclaim_after=after) as busy:
        for topic in ("bills", "orders"):
            await publish(redis_url, Message(topic, b"2"))
            await receive(busy, 1)
        with SyncRedis.from_url(redis_url) as client:
            client.delete("bills")
        async with source(redis_url, "orders", reclaim_after=after) as other:
            until = time.monotonic() + 3
            while time.monotonic() < until:
                assert not await other.receive(limit=1)
    async with source(redis_url, "orders") as other:
        assert payloads(await receive(other, 1)) == [2]


async def test_a_deleted_stream_starts_again(redis_url: str) -> None:
    async with source(redis_url, "orders") as consumer:
        with SyncRedis.from_url(redis_url) as client:
            client.delete("orders")
        await publish(redis_url, *numbered(1))
        assert payloads(await receive(consumer, 1)) == [0]


async def test_streams_lost_in_a_restart_are_recreated(
    private_redis: RedisServer,
) -> None:
    # Short, so that the search for dead replicas' entries finds the group missing.
    often = timedelta(milliseconds=30)
    async with source(private_redis.url, "orders", reclaim_after=often) as consumer:
        private_redis.kill()
        private_redis.start()
        await publish(private_redis.url, *numbered(1))
        assert payloads(await receive_despite_losses(consumer, 1)) == [0]


async def test_a_topic_that_is_not_a_stream_is_refused_at_start(
    redis_url: str,
) -> None:
    with SyncRedis.from_url(redis_url) as client:
        client.set("taken", "x")
    with pytest.raises(ConfigError, match="topic 'taken'"):
        async with source(redis_url, "taken"):
            pass
