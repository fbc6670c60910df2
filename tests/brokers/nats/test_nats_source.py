"""Deliveries from NATS JetStream: the behaviour that the suite doesn't cover."""

import asyncio
from datetime import timedelta
from functools import partial
from typing import Any

import nats
import pytest

from pillarbox import Message
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.outbox.errors import ConfigError
from pillarbox.outbox.lane import Priority
from pillarbox.outbox.testing.samples import numbered, numbers_by_key
from tests.fixtures.nats import ask, make_stream
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sources import (
    entered,
    payloads,
    publish,
    receive,
    receive_despite_losses,
)
from tests.servers.nats import NatsServer

SOON = timedelta(milliseconds=100)
SETTINGS = {"ack_wait": 7_000_000_000, "max_deliver": 9, "max_ack_pending": 1}


def sharing(*args: Any, **settings: Any) -> NatsSource:
    made = NatsSource(*args, **settings)
    made.abilities.share()
    return made


source = partial(entered, NatsSource, "billing")
shared_source = partial(entered, sharing, "billing")


async def durables(url: str, stream: str) -> list[str]:
    return (await ask(url, f"CONSUMER.NAMES.{stream}"))["consumers"] or []


async def delete_durable(url: str, stream: str) -> None:
    (name,) = await durables(url, stream)
    await ask(url, f"CONSUMER.DELETE.{stream}.{name}")


@pytest.mark.parametrize("topics", [["ord*"], ["a b"], ["$JS.*"], [".*"]])
async def test_a_topic_that_nats_cannot_filter_by_is_refused(
    shared_nats: NatsServer, topics: list[str]
) -> None:
    with pytest.raises(ConfigError, match="topic"):
        async with source(shared_nats.url, *topics):
            pass


async def test_overlapping_topics_and_prefixes_deliver_once(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topics = [f"{nats_topics}.{t}" for t in ("a", "b.c", "b.d.e")]
    await publish(
        shared_nats.url, *[Message(t, b"%d" % n) for n, t in enumerate(topics)]
    )
    listened = [topics[0], f"{nats_topics}.b.*", topics[1], f"{nats_topics}.b.d.*"]
    async with source(shared_nats.url, *listened) as consumer:
        assert sorted(payloads(await receive(consumer, 3))) == [0, 1, 2]
        assert await consumer.receive(limit=10) == []
    assert len(await durables(shared_nats.url, nats_topics)) == 2


async def test_options_are_applied_to_an_existing_durable(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"

    async def config() -> Any:
        answer = await ask(shared_nats.url, f"CONSUMER.LIST.{nats_topics}")
        (durable,) = answer["consumers"]
        return durable["config"]

    async with shared_source(shared_nats.url, topic):
        made = await config()
    assert (made["ack_wait"], made["max_deliver"]) == (30_000_000_000, -1)
    async with shared_source(shared_nats.url, topic, ack_wait=timedelta(seconds=7)):
        pass
    async with shared_source(shared_nats.url, topic, max_ack_pending=1):
        changed = await config()
    assert changed == made | {"ack_wait": 7_000_000_000, "max_ack_pending": 1}


async def test_the_next_reader_keeps_the_settings_that_it_does_not_change(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, hold = f"{nats_topics}.x", timedelta(seconds=7)
    async with source(shared_nats.url, topic, ack_wait=hold, max_deliver=9):
        pass
    async with source(shared_nats.url, topic, max_ack_pending=1) as reader:
        await publish(shared_nats.url, Message(topic, b"1"))
        await receive(reader, 1)
        answer = await ask(shared_nats.url, f"CONSUMER.LIST.{nats_topics}")
        (durable,) = answer["consumers"]
        assert durable["config"] | SETTINGS == durable["config"]


async def test_a_single_replica_gets_the_messages_of_a_key_in_order(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    messages = numbered(topic, 60, keys=7)
    await publish(shared_nats.url, *messages)
    arrived: list[Message] = []
    async with source(shared_nats.url, topic) as consumer:
        deliveries = await receive(consumer, 60)
        for delivery in deliveries[:10]:
            arrived.append(delivery.message)
            await delivery.ack()
        await deliveries[10].nack(SOON)
        for delivery in deliveries[11:]:
            await delivery.nack()
        while len(arrived) < 60:
            for delivery in await receive(consumer, 1):
                arrived.append(delivery.message)
                await delivery.ack()
    assert numbers_by_key(arrived) == numbers_by_key(messages)


async def test_what_a_left_source_held_comes_first_and_in_order(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    await publish(shared_nats.url, *numbered(topic, 6))
    async with source(shared_nats.url, topic) as consumer:
        first, *_ = await receive(consumer, 6)
        await first.ack()
    async with source(shared_nats.url, topic) as consumer:
        assert payloads(await receive(consumer, 5)) == [1, 2, 3, 4, 5]


async def test_nothing_waits_for_what_another_replica_is_handling(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    await publish(shared_nats.url, Message(topic, b"0"))
    async with shared_source(shared_nats.url, topic) as one:
        # A pull of one message, so that none is open when the next one is published.
        (held,) = await receive_despite_losses(one, 1, limit=1)
        # By default ack_wait is 30 s, after which the message would be missing.
        async with asyncio.timeout(15), shared_source(shared_nats.url, topic) as other:
            await publish(shared_nats.url, Message(topic, b"1"))
            assert payloads(await receive(other, 1)) == [1]
        await held.ack()


async def test_a_message_that_cannot_be_redelivered_has_a_problem(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    await publish(shared_nats.url, Message(topic, b"1"))
    for last in (False, False, True):
        async with shared_source(shared_nats.url, topic, max_deliver=3) as consumer:
            (delivery,) = await receive(consumer, 1)
        assert ("max_deliver" in (delivery.problem or "")) is last


async def test_with_one_message_at_a_time_replicas_keep_the_order(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    await publish(shared_nats.url, *numbered(topic, 20))
    seen: list[int] = []
    async with (
        shared_source(shared_nats.url, topic, max_ack_pending=1) as one,
        shared_source(shared_nats.url, topic, max_ack_pending=1) as other,
    ):

        async def work(replica: NatsSource) -> None:
            while len(seen) < 20:
                for delivery in await replica.receive(limit=5):
                    seen.append(int(delivery.message.payload))
                    await delivery.ack()

        async with asyncio.timeout(60), asyncio.TaskGroup() as replicas:
            replicas.create_task(work(one))
            replicas.create_task(work(other))
    assert seen == list(range(20))


async def test_a_deleted_durable_is_recreated(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    async with source(shared_nats.url, topic) as consumer:
        await delete_durable(shared_nats.url, nats_topics)
        await publish(shared_nats.url, Message(topic, b"1"))
        assert payloads(await receive_despite_losses(consumer, 1)) == [1]


async def test_urgent_messages_are_found_soon_however_short_a_wait_is(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic, received = f"{nats_topics}.x", 0
    bulk = [Message(topic, b"", priority=Priority.BULK) for _ in range(2500)]
    await publish(shared_nats.url, *bulk, Message(topic, b"!"))
    reader = NatsSource(
        shared_nats.url,
        consumer="billing",
        topics=[topic],
        poll_interval=timedelta(microseconds=300),
    )
    async with await nats.connect(shared_nats.url) as client, reader as consumer:
        while b"!" not in [
            it.message.payload for it in await receive(consumer, 1, limit=1)
        ]:
            received += 1
            await client.flush()  # as long as a short handler
    assert received < len(bulk) / 2


async def test_heartbeats_go_on_over_a_new_connection_while_nothing_is_received(
    shared_nats: NatsServer, nats_topics: str, proxy: MakeProxy
) -> None:
    topic, hold = f"{nats_topics}.x", timedelta(seconds=2)
    between, url = proxy(shared_nats.url)
    await publish(shared_nats.url, Message(topic, b"1"))
    async with shared_source(url, topic, ack_wait=hold) as busy:
        (delivery,) = await receive(busy, 1)
        between.cut()
        async with (
            asyncio.timeout(60),
            shared_source(shared_nats.url, topic) as other,
        ):
            until = asyncio.get_running_loop().time() + 2 * hold.total_seconds()
            while asyncio.get_running_loop().time() < until:
                assert not await other.receive(limit=1)
        await delivery.ack()


@pytest.mark.parametrize("opened", [source, shared_source], ids=["key", "none"])
async def test_a_new_stream_of_the_same_name_loses_no_message_to_what_is_held(
    shared_nats: NatsServer, nats_topics: str, opened: Any
) -> None:
    topic = f"{nats_topics}.x"
    async with opened(shared_nats.url, topic) as consumer:
        await publish(shared_nats.url, *numbered(topic, 3))
        held = await receive(consumer, 3)
        await ask(shared_nats.url, f"STREAM.DELETE.{nats_topics}")
        await make_stream(shared_nats.url, nats_topics, f"{nats_topics}.>")
        await publish(shared_nats.url, *numbered(topic, 3, start=3))
        assert payloads(await receive_despite_losses(consumer, 3)) == [3, 4, 5]
        for delivery in held:
            await delivery.ack()
    async with opened(shared_nats.url, topic) as consumer:
        assert payloads(await receive_despite_losses(consumer, 3)) == [3, 4, 5]


async def test_a_topic_that_another_stream_captures_now_is_read_from_there(
    shared_nats: NatsServer, nats_topics: str
) -> None:
    topic = f"{nats_topics}.x"
    async with source(shared_nats.url, topic) as consumer:
        await publish(shared_nats.url, *numbered(topic, 1))
        (delivery,) = await receive(consumer, 1)
        await delivery.ack()
        await ask(shared_nats.url, f"STREAM.DELETE.{nats_topics}")
        await make_stream(shared_nats.url, f"{nats_topics}-new", f"{nats_topics}.>")
        await publish(shared_nats.url, *numbered(topic, 1, start=1))
        async with asyncio.timeout(20):
            assert payloads(await receive_despite_losses(consumer, 1)) == [1]
