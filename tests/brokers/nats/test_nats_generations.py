"""One replica at a time reads a topic, and the next begins with what it held."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from datetime import timedelta
from typing import Any

import nats
import pytest

from pillarbox import Message
from pillarbox.inbox.poison.history import FIRST_DELIVERY, TakenOver
from pillarbox.inbox.source import Source
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.gather import end
from pillarbox.outbox.testing.samples import numbered
from tests.brokers.nats.test_nats_source import durables, shared_source, source
from tests.fixtures.nats import ask, make_stream
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sources import payloads, publish, receive, receive_despite_losses
from tests.fixtures.urls import with_options
from tests.servers.nats import NatsServer, nats_server

HOLD = timedelta(seconds=1)


async def handle(source: Source, count: int) -> list[int]:
    """Receive and ack, despite losses, and return the numbers."""
    numbers: list[int] = []
    while len(numbers) < count:
        for delivery in await receive_despite_losses(source, 1):
            numbers += payloads([delivery])
            await delivery.ack()
    return numbers


async def until_standing_by(source: Source) -> list[int]:
    """Receive until another replica reads; return the numbers that arrived."""
    numbers: list[int] = []
    async with asyncio.timeout(60):
        while not source.abilities.standing_by():
            with suppress(BrokerUnavailableError):
                numbers += payloads(await source.receive(limit=10))
    return numbers


async def until_none_pulls(url: str, place: str) -> None:
    async with asyncio.timeout(60):
        while (await ask(url, f"CONSUMER.INFO.{place}"))["num_waiting"]:
            pass


async def test_a_reader_that_was_frozen_in_its_pull_reads_nothing_more(
    shared_nats: NatsServer, nats_topics: str, proxy: MakeProxy
) -> None:
    topic = f"{nats_topics}.x"
    between, url = proxy(shared_nats.url)
    pulling = NatsSource(
        with_options(url, ack_wait=HOLD),
        consumer="billing",
        topics=[topic],
        poll_interval=timedelta(seconds=60),
    )
    async with (
        pulling as frozen,
        source(shared_nats.url, topic, ack_wait=HOLD) as other,
    ):
        await publish(shared_nats.url, *numbered(topic, 2))
        first, _ = await receive(frozen, 2)
        assert await until_standing_by(other) == []
        between.stall()
        await first.ack()
        await publish(shared_nats.url, *numbered(topic, 4, start=2))
        assert await handle(other, 6) == [0, 1, 2, 3, 4, 5]
        between.resume()
        await publish(shared_nats.url, *numbered(topic, 4, start=6))
        assert await handle(other, 4) == [6, 7, 8, 9]
        # NATS had sent these to the open pull.
        assert {*await until_standing_by(frozen)} <= {2, 3, 4, 5}


async def test_what_a_reader_left_is_suspect_up_to_a_limit(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    async with source(shared_nats.url, topic) as first:
        await publish(shared_nats.url, *numbered(topic, 3))
        await receive(first, 3)
    async with source(shared_nats.url, topic) as second:
        (history,) = {each.history for each in await receive(second, 3)}
        assert isinstance(history, TakenOver)
        await publish(shared_nats.url, *numbered(topic, 1))
        (new,) = await receive(second, 1)
        assert new.history is FIRST_DELIVERY


async def test_a_frozen_reader_is_replaced_after_ack_wait_and_not_before(
    shared_nats: NatsServer, nats_topics: str, proxy: MakeProxy
) -> None:
    topic, loop = f"{nats_topics}.x", asyncio.get_running_loop()
    between, url = proxy(shared_nats.url)
    async with (
        source(url, topic, ack_wait=2 * HOLD) as frozen,
        source(shared_nats.url, topic, ack_wait=2 * HOLD) as other,
    ):
        await publish(shared_nats.url, Message(topic, b"1"))
        await receive(frozen, 1)
        await until_standing_by(other)
        between.stall()
        stalled_at = loop.time()
        assert await handle(other, 1) == [1]
        assert loop.time() - stalled_at > 1.4
        between.resume()


async def test_of_replicas_that_begin_together_one_reads(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    await publish(shared_nats.url, *numbered(topic, 5))
    seen: dict[int, list[int]] = {}
    news = asyncio.Event()

    async def work(number: int, replica: Source) -> None:
        while True:
            with suppress(BrokerUnavailableError):
                for delivery in await replica.receive(limit=5):
                    seen.setdefault(number, []).extend(payloads([delivery]))
                    await delivery.ack()
            news.set()

    async def until(condition: Callable[[], bool]) -> None:
        while not condition():
            news.clear()
            await news.wait()

    async with AsyncExitStack() as stack, asyncio.timeout(60):
        replicas = await asyncio.gather(
            *(
                stack.enter_async_context(source(shared_nats.url, topic))
                for _ in range(4)
            )
        )
        tasks = [asyncio.create_task(work(*each)) for each in enumerate(replicas)]
        await until(lambda: sum(bool(r.abilities.standing_by()) for r in replicas) == 3)
        seen.clear()
        await publish(shared_nats.url, *numbered(topic, 5, start=5))
        await until(lambda: any(9 in numbers for numbers in seen.values()))
        await end(tasks)
    assert len(seen) == 1
    assert next(iter(seen.values()))[-5:] == [5, 6, 7, 8, 9]
    assert len(await durables(shared_nats.url, nats_topics)) == 1


@pytest.mark.parametrize("retention", ["limits", "interest", "workqueue"])
async def test_from_shared_to_ordered_and_back_nothing_is_lost(
    shared_nats: NatsServer, retention: str
) -> None:
    stream = f"kept-{retention}"
    topic = f"{stream}.x"
    await make_stream(shared_nats.url, stream, f"{stream}.>", retention=retention)
    async with shared_source(shared_nats.url, topic, ack_wait=HOLD) as shared:
        await publish(shared_nats.url, *numbered(topic, 6))
        for delivery in (await receive(shared, 6))[:2]:
            await delivery.ack()
    (old,) = await durables(shared_nats.url, stream)
    async with source(shared_nats.url, topic) as reader:
        deliveries = await receive(reader, 4)
        assert payloads(deliveries) == [2, 3, 4, 5]
        await deliveries[0].ack()
        await deliveries[2].ack()
    (name,) = await durables(shared_nats.url, stream)
    assert name.startswith(f"{old}-1-")
    # A stream that keeps settled messages delivers again what was acked out of order.
    left = [3, 4, 5] if retention == "limits" else [3, 5]
    for again in (source, shared_source):
        async with again(shared_nats.url, topic) as replica:
            assert payloads(await receive(replica, len(left))) == left
    assert await durables(shared_nats.url, stream) == [old]


async def test_while_replicas_share_none_reads_alone(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    async with source(shared_nats.url, topic, ack_wait=HOLD) as reader:
        async with shared_source(shared_nats.url, topic) as shared:
            working = asyncio.create_task(handle(shared, 3))
            await until_standing_by(reader)
            await publish(shared_nats.url, *numbered(topic, 3))
            assert await working == [0, 1, 2]
        await publish(shared_nats.url, *numbered(topic, 3, start=3))
        assert await handle(reader, 3) == [3, 4, 5]


async def test_generations_that_a_crash_left_are_followed_by_one(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    await publish(shared_nats.url, *numbered(topic, 9))
    async with source(shared_nats.url, topic) as reader:
        for delivery in (await receive(reader, 9))[:4]:
            await delivery.ack()
    (name,) = await durables(shared_nats.url, nats_topics)
    for number, start in ((2, 3), (12, 4)):
        config = {
            "durable_name": f"{name.rsplit('-', 2)[0]}-{number}-0123abcd",
            "ack_policy": "explicit",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": start,
            "filter_subject": topic,
        }
        await ask(
            shared_nats.url,
            f"CONSUMER.DURABLE.CREATE.{nats_topics}.{config['durable_name']}",
            stream_name=nats_topics,
            config=config,
        )
    async with source(shared_nats.url, topic) as reader:
        assert await handle(reader, 5) == [4, 5, 6, 7, 8]
        (last,) = await durables(shared_nats.url, nats_topics)
    assert "-13-" in last


async def test_a_delivery_that_was_lost_comes_before_anything_newer(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    async with source(shared_nats.url, topic) as reader:
        await publish(shared_nats.url, Message(topic, b"0"))
        assert await handle(reader, 1) == [0]
        (name,) = await durables(shared_nats.url, nats_topics)
        await until_none_pulls(shared_nats.url, f"{nats_topics}.{name}")
        await publish(shared_nats.url, *numbered(topic, 2, start=1))
        async with await nats.connect(shared_nats.url) as thief:
            # NATS doesn't send it again before ack_wait, which is 30 s.
            pulled = await thief.jetstream().pull_subscribe_bind(name, nats_topics)
            (stolen,) = await pulled.fetch(1, timeout=60)
        assert stolen.data == b"1"
        async with asyncio.timeout(15):
            assert await handle(reader, 2) == [1, 2]


def server_for(*denied: str) -> dict[str, Any]:
    """Return settings of a server with a user that may not publish to subjects."""
    users = [
        {"user": "all", "password": "all"},
        {
            "user": "some",
            "password": "some",
            "permissions": {"publish": {"deny": denied}},
        },
    ]
    return {"authorization": {"users": users, "timeout": 60}}


@pytest.mark.parametrize(
    "denied",
    [
        "$JS.API.CONSUMER.DELETE.>",
        "$JS.API.CONSUMER.DURABLE.CREATE.>",
        "$JS.API.CONSUMER.NAMES.>",
        "$JS.API.STREAM.INFO.>",
        "pillarbox.reads.>",
    ],
)
async def test_a_user_without_a_right_is_refused_with_the_remedy(denied: str) -> None:
    with nats_server(server_for(denied)) as server:
        every = server.url.replace("://", "://all:all@")
        some = server.url.replace("://", "://some:some@")
        await make_stream(every, "ORDERS", "orders.>")
        with pytest.raises(ConfigError) as refused:
            async with source(some, "orders.x"):
                pass
        assert "permissions violation for publish" in str(refused.value)
        assert "grant the user publish on $JS.API.> and" in str(refused.value)
        assert not await durables(every, "ORDERS")
