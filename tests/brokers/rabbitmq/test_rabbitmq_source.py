"""The RabbitMQ source beyond the suite: bindings, replicas and closing channels."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from pika.exceptions import ChannelClosedByBroker

from pillarbox import Message
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.rabbitmq import RabbitMQSource
from pillarbox.inbox.sources.rabbitmq.queue import Queue, QueueConfig, binding_key
from pillarbox.outbox.brokers.rabbitmq.amqp import NOT_FOUND, AmqpConnection
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.gather import end
from tests.fixtures.consumers import numbered
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.rabbitmq import channel_of, user
from tests.fixtures.sources import (
    payloads,
    publish,
    receive_despite_losses,
    until_lost,
)
from tests.fixtures.urls import with_options
from tests.fixtures.waiting import wait_for
from tests.servers.rabbitmq import RabbitMQServer

SOON = timedelta(milliseconds=50)
QUORUM = {"x-queue-type": "quorum"}


@pytest.fixture
def consumer() -> str:
    """A consumer name that no other test uses."""
    return f"billing-{uuid4().hex}"


@asynccontextmanager
async def source(
    url: str, consumer: str, *topics: str, shared: object = False, **options: object
) -> AsyncIterator[RabbitMQSource]:
    made = RabbitMQSource(
        with_options(url, **options),
        consumer=consumer,
        topics=topics or ("orders",),
        poll_interval=SOON,
    )
    if shared:
        made.abilities.share()
    async with made as entered:
        yield entered


@pytest.mark.parametrize(
    ("topic", "key"),
    [
        ("orders", "orders"),
        ("orders.*", "orders.*.#"),
        ("orders.placed.*", "orders.placed.*.#"),
        ("*", "#"),
    ],
)
def test_topics_are_bound_by_keys(topic: str, key: str) -> None:
    assert binding_key(topic) == key


@pytest.mark.parametrize("topic", ["ord*", "a.#", "a.#.b", "#.*", "ä" * 127 + ".*"])
def test_a_topic_that_no_binding_key_can_match_is_refused(topic: str) -> None:
    with pytest.raises(ConfigError, match="topic"):
        binding_key(topic)


async def test_a_prefix_matches_topics_that_start_with_it_and_no_others(
    rabbitmq_url: str, consumer: str
) -> None:
    topics = ["orders", "orders.", "orders.a", "orders.a.b", "ordersx.a", "x.orders.a"]
    async with (
        source(rabbitmq_url, consumer, "orders.*") as some,
        source(rabbitmq_url, f"{consumer}-all", "*") as every,
    ):
        await publish(rabbitmq_url, *(Message(topic, b"1") for topic in topics))
        found = [d.message.topic for d in await receive_despite_losses(some, 3)]
        assert await some.receive(limit=10) == []
        assert sorted(found) == ["orders.", "orders.a", "orders.a.b"]
        assert len(await receive_despite_losses(every, len(topics))) == len(topics)


def test_a_quorum_queue_of_rabbitmq_4_drops_no_returned_messages() -> None:
    config = QueueConfig(name="q", exchange="e", topics=())
    assert config.arguments((4, 0))["x-delivery-limit"] == -1
    assert "x-delivery-limit" not in config.arguments((3, 13))


async def test_a_flood_that_one_replica_hands_back_does_not_stay_with_it(
    rabbitmq_url: str, consumer: str
) -> None:
    async def hand_back(old: RabbitMQSource) -> None:
        while True:
            for delivery in await old.receive(limit=100):
                assert await delivery.hand_back(timedelta(seconds=10))
                returned.add(delivery.message.id)
            if len(returned) == 300:
                has_all.set()

    returned, handled, has_all = set[UUID](), set[UUID](), asyncio.Event()
    async with source(rabbitmq_url, consumer, shared=True, prefetch=20) as old:
        await publish(rabbitmq_url, *numbered(300, keys=300))
        handing_back = asyncio.create_task(hand_back(old))
        async with asyncio.timeout(150):
            await has_all.wait()
            async with source(rabbitmq_url, consumer, shared=True, prefetch=50) as new:
                while len(handled) < 300:
                    for delivery in await new.receive(limit=100):
                        await delivery.ack()
                        handled.add(delivery.message.id)
        await end([handing_back])


async def take_over(second: RabbitMQSource, put: int) -> float:
    """Return after how many seconds it receives; check that it has the messages."""
    began = time.monotonic()
    arrived = await receive_despite_losses(second, 1)
    seconds = time.monotonic() - began
    arrived += await receive_despite_losses(second, put - len(arrived))
    assert payloads(arrived) == list(range(put))
    return seconds


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_replica_that_stands_by_soon_takes_over_and_begins_with_what_was_held(
    rabbitmq_url: str, proxy: MakeProxy, consumer: str, queue_type: str
) -> None:
    server, url = proxy(rabbitmq_url)
    async with AsyncExitStack() as replicas:
        async with source(rabbitmq_url, consumer, queue_type=queue_type) as first:
            second = await replicas.enter_async_context(source(url, consumer))
            await publish(rabbitmq_url, *numbered(20))
            await receive_despite_losses(first, 20)
            assert await second.receive(limit=10) == []
            assert list(second.abilities.standing_by()) == ["orders"]
        assert await take_over(second, 20) < 1
        assert not second.abilities.standing_by()
        third = await replicas.enter_async_context(source(rabbitmq_url, consumer))
        assert await third.receive(limit=10) == []
        await asyncio.to_thread(server.cut)
        assert await take_over(third, 20) < 2


async def test_a_replica_frozen_before_it_consumes_receives_nothing_when_it_wakes(
    rabbitmq_url: str,
    proxy: MakeProxy,
    consumer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    consume, may, asleep, awake = (
        Queue.consume,
        [False],
        asyncio.Event(),
        asyncio.Event(),
    )

    async def freeze_first(self: Queue, *arguments: Any) -> None:
        if not may[0]:
            may[0] = True
            asleep.set()
            await awake.wait()
        await consume(self, *arguments)

    monkeypatch.setattr(Queue, "consume", freeze_first)
    server, url = proxy(rabbitmq_url)
    async with source(url, consumer) as frozen:
        reading = asyncio.create_task(frozen.receive(limit=10))
        await asleep.wait()
        async with source(rabbitmq_url, consumer) as other:
            await publish(rabbitmq_url, *numbered(20))
            assert await other.receive(limit=10) == []
            # As the server does when it has missed two heartbeats.
            await asyncio.to_thread(server.cut)
            held = await receive_despite_losses(other, 20)
            awake.set()
            with pytest.raises(BrokerUnavailableError):
                await reading
            while not frozen.abilities.standing_by():
                with suppress(BrokerUnavailableError):
                    assert await frozen.receive(limit=10) == []
            assert payloads(held) == list(range(20))


async def test_a_replica_whose_channel_is_lost_lets_others_consume_while_it_is_busy(
    rabbitmq_url: str, consumer: str
) -> None:
    def is_released() -> bool:
        with channel_of(rabbitmq_url) as channel:
            try:
                channel.queue_declare(f"{consumer}.owner", passive=True)
            except ChannelClosedByBroker as error:
                return bool(error.reply_code == NOT_FOUND)
            return False

    async with source(rabbitmq_url, consumer) as busy:
        assert await busy.receive(limit=10) == []
        assert not is_released()
        with channel_of(rabbitmq_url) as channel:
            channel.queue_delete(consumer)
        await asyncio.to_thread(wait_for, "it lets the lock go", is_released)


async def test_beside_replicas_that_share_none_consumes_in_order(
    rabbitmq_url: str, consumer: str
) -> None:
    async with source(rabbitmq_url, consumer) as new:
        async with source(rabbitmq_url, consumer, shared=True) as old:
            assert await old.receive(limit=10) == []
            await publish(rabbitmq_url, *numbered(20))
            await receive_despite_losses(old, 10, limit=10)
            assert await new.receive(limit=10) == []
            assert list(new.abilities.standing_by()) == ["orders"]
        assert await take_over(new, 20) < 1


async def test_replicas_with_different_limits_keep_a_backlog_in_order(
    rabbitmq_url: str, proxy: MakeProxy, consumer: str
) -> None:
    server, url = proxy(rabbitmq_url)
    async with source(rabbitmq_url, consumer):
        pass
    await publish(rabbitmq_url, *numbered(600))
    for limit in (120, 10, 40):
        async with source(url, consumer) as killed:
            await receive_despite_losses(killed, limit, limit=limit)
            await asyncio.to_thread(server.cut)
    async with source(rabbitmq_url, consumer) as last:
        assert payloads(await receive_despite_losses(last, 600)) == list(range(600))


@pytest.mark.parametrize("options", [{}, {"single_active_consumer": True}])
async def test_keys_stay_in_order_while_replicas_leave_messages_to_each_other(
    rabbitmq_url: str, consumer: str, options: dict[str, object]
) -> None:
    async def handle(replica: RabbitMQSource, mine: int) -> None:
        while len(handled) < 200:
            with suppress(BrokerUnavailableError):
                for delivery in await replica.receive(limit=10):
                    (number,) = payloads([delivery])
                    if number % 50 == mine or delivery.message.key in returned[mine]:
                        assert await delivery.hand_back(timedelta(seconds=0.2))
                        returned[mine].add(delivery.message.key)
                    else:
                        handled.setdefault(number, delivery.message.key)
                        await delivery.ack()
            returned[mine].clear()

    handled: dict[int, str | None] = {}
    returned: list[set[str | None]] = [set(), set()]
    async with (
        source(rabbitmq_url, consumer, **options) as one,
        source(rabbitmq_url, consumer, **options) as other,
        asyncio.timeout(60),
    ):
        await publish(rabbitmq_url, *numbered(200, keys=7))
        await asyncio.gather(handle(one, 0), handle(other, 1))
    for key in set(handled.values()):
        of_key = [number for number, its in handled.items() if its == key]
        assert of_key == sorted(of_key)


async def test_a_consumer_needs_to_configure_the_queue_that_shows_who_consumes(
    shared_rabbitmq: RabbitMQServer, rabbitmq_url: str, consumer: str
) -> None:
    async with source(rabbitmq_url, consumer):
        pass
    with user(shared_rabbitmq, consumer, "secret", "^$"):
        url = rabbitmq_url.replace("guest:guest", f"{consumer}:secret")
        with pytest.raises(ConfigError, match=rf"{consumer}\.owner.*grant.*configure"):
            async with source(url, consumer):
                pass
        async with source(url, consumer, shared=True) as sharing:
            assert await sharing.receive(limit=1) == []


async def test_a_queue_that_rabbitmq_4_limits_is_reported_and_ours_is_not(
    rabbitmq_url: str, consumer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = f"older-{consumer}"
    with channel_of(rabbitmq_url) as channel:
        channel.queue_declare(older, durable=True, arguments=QUORUM)
    monkeypatch.setattr(AmqpConnection, "server_version", (4, 0))
    async with source(rabbitmq_url, consumer) as ours:
        assert not ours.abilities.warnings()
    async with source(rabbitmq_url, older) as existing:
        (warning,) = existing.abilities.warnings()
    assert f"queue '{older}' lacks x-delivery-limit" in warning


async def test_what_is_returned_30_times_is_lost_only_where_it_was_reported(
    rabbitmq_url: str, consumer: str
) -> None:
    older = f"older-{consumer}"
    with channel_of(rabbitmq_url) as channel:
        channel.queue_declare(older, durable=True, arguments=QUORUM)
    for name in (consumer, older):
        async with source(rabbitmq_url, name, prefetch=1) as only:
            reported = bool(only.abilities.warnings())
            await publish(rabbitmq_url, *numbered(1))
        received = 0
        with channel_of(rabbitmq_url) as channel:
            for _ in range(30):
                method, _properties, _body = channel.basic_get(name)
                if method is not None:
                    received += 1
                    channel.basic_reject(method.delivery_tag or 0)
        assert (received < 30) == reported


async def test_at_most_the_prefetch_is_held_and_a_retry_holds_its_key(
    rabbitmq_url: str, consumer: str
) -> None:
    async with source(rabbitmq_url, consumer, prefetch=4) as only:
        await publish(rabbitmq_url, *numbered(8, keys=4))
        held = await receive_despite_losses(only, 4)
        assert await only.receive(limit=100) == []
        await held[0].nack(timedelta(milliseconds=300))
        for delivery in held[1:]:
            await delivery.ack()
        others = await receive_despite_losses(only, 2)
        assert payloads(others) == [5, 6]
        await others[0].ack()
        assert payloads(await receive_despite_losses(only, 1)) == [7]
        again = await receive_despite_losses(only, 2)
        assert payloads(again) == [0, 4]
        assert [delivery.attempts for delivery in again] == [1, 0]


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_one_replica_works_at_a_time_and_the_order_is_kept_when_it_leaves(
    rabbitmq_url: str, consumer: str, queue_type: str
) -> None:
    settings = {
        "single_active_consumer": True,
        "queue_type": queue_type,
        "prefetch": 20,
    }
    async with source(rabbitmq_url, consumer, **settings) as second:
        async with source(rabbitmq_url, consumer, **settings) as first:
            # The first to ask becomes the active consumer.
            assert await first.receive(limit=10) == []
            assert await second.receive(limit=10) == []
            await publish(rabbitmq_url, *numbered(50))
            assert await second.receive(limit=10) == []
            for delivery in (await receive_despite_losses(first, 10, limit=10))[:5]:
                await delivery.ack()
        rest: list[Delivery] = []
        while len(rest) < 45:
            for delivery in await receive_despite_losses(second, 1):
                rest.append(delivery)
                await delivery.ack()
    assert payloads(rest) == list(range(5, 50))


async def test_a_queue_without_single_active_consumer_is_reported(
    rabbitmq_url: str, consumer: str
) -> None:
    async with source(rabbitmq_url, consumer):
        pass
    with pytest.raises(ConfigError, match="x-single-active-consumer"):
        async with source(rabbitmq_url, consumer, single_active_consumer=True):
            pass


async def test_an_existing_queue_is_used_as_it_is(
    rabbitmq_url: str, consumer: str
) -> None:
    with channel_of(rabbitmq_url) as channel:
        channel.queue_declare(consumer, durable=True, arguments={"x-max-length": 3})
    async with source(rabbitmq_url, consumer) as only:
        await publish(rabbitmq_url, *numbered(3))
        assert payloads(await receive_despite_losses(only, 3)) == [0, 1, 2]


async def test_a_deleted_queue_is_redeclared(rabbitmq_url: str, consumer: str) -> None:
    async with source(rabbitmq_url, consumer) as only:
        assert await only.receive(limit=10) == []
        with channel_of(rabbitmq_url) as channel:
            channel.queue_delete(consumer)
        with pytest.raises(BrokerUnavailableError, match="was deleted"):
            await until_lost(only)
        assert await only.receive(limit=10) == []
        await publish(rabbitmq_url, *numbered(3))
        assert payloads(await receive_despite_losses(only, 3)) == [0, 1, 2]


async def test_a_deleted_queue_with_two_consumers_is_the_reason_of_the_loss(
    rabbitmq_url: str, consumer: str
) -> None:
    async with source(rabbitmq_url, consumer, shared=True, prefetch=2) as only:
        await publish(rabbitmq_url, *numbered(2, keys=2))
        for delivery in await receive_despite_losses(only, 2):
            assert await delivery.hand_back(timedelta(minutes=1))
        for _ in range(2):  # what is aside fills its prefetch, so it consumes again
            assert await only.receive(limit=10) == []
        with channel_of(rabbitmq_url) as channel:
            channel.queue_delete(consumer)
        with pytest.raises(BrokerUnavailableError, match="was deleted"):
            await until_lost(only)


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
async def test_a_redelivered_message_keeps_its_attempts_its_wait_and_its_outcome(
    rabbitmq_url: str, proxy: MakeProxy, consumer: str, queue_type: str
) -> None:
    server, url = proxy(rabbitmq_url)
    async with source(url, consumer, queue_type=queue_type) as only:
        await publish(rabbitmq_url, *numbered(3, keys=3))
        failed, done, slow = await receive_despite_losses(only, 3)
        due = time.monotonic() + 4
        await failed.nack(timedelta(seconds=4))
        await asyncio.to_thread(server.cut)
        with pytest.raises(BrokerUnavailableError):
            await until_lost(only)
        # Its ack is lost with the connection.
        await done.ack()
        again = await receive_despite_losses(only, 2)
        assert time.monotonic() >= due
        assert [(int(d.message.payload), d.attempts) for d in again] == [(2, 0), (0, 1)]
        await slow.nack()
        assert await only.receive(limit=10) == []
