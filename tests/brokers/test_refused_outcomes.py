"""A broker that delivers but refuses acks is reported, and fetching stops."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from redis import Redis
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, Message
from pillarbox.inbox.events import (
    DuplicateSkipped,
    MessageHandled,
    SourceLost,
    SourceRecovered,
)
from pillarbox.inbox.source import Source
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.inbox.sources.redis import RedisSource
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.publisher import Acked, Publisher
from pillarbox.relay.publishers.nats import NatsPublisher
from pillarbox.relay.publishers.redis import RedisPublisher
from tests.fixtures.consumers import async_sessions_of, running
from tests.fixtures.nats import ask
from tests.servers.nats import nats_server
from tests.servers.redis import RedisServer

TOPIC = "orders.placed"
SOON = timedelta(milliseconds=50)


@asynccontextmanager
async def billing(source: Source, database_url: str) -> AsyncIterator[RecordedEvents]:
    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="billing")

        @consumer.handles(TOPIC)
        async def handle(session: AsyncSession, message: Message) -> None:
            pass

        async with running(consumer) as events:
            yield events


async def put(publisher: Publisher, payload: bytes) -> None:
    assert await publisher.publish([Message(TOPIC, payload)]) == [Acked()]


async def until_outcomes_are_refused(events: RecordedEvents) -> list[SourceLost]:
    """Return the events up to one about outcomes, after which fetching stops."""
    lost: list[SourceLost] = []
    while not (lost and "can't record outcomes" in lost[-1].reason):
        lost = await events.wait_for(SourceLost, len(lost) + 1)
    return lost


def without_acks(*, denied: bool) -> dict[str, Any]:
    """Return settings with two users, the second of which may not ack if `denied`."""
    deny: dict[str, Any] = {"publish": {"deny": ["$JS.ACK.>"]}} if denied else {}
    users = [
        {"user": "all", "password": "all"},
        {"user": "some", "password": "some", "permissions": deny},
    ]
    return {"authorization": {"users": users, "timeout": 60}}


async def test_a_nats_user_without_ack_permission_is_reported_and_fetches_no_more(
    database_url: str,
) -> None:
    with nats_server(without_acks(denied=True)) as server:
        address = server.url.removeprefix("nats://")
        every = f"nats://all:all@{address}?stream=ORDERS&create=orders.>"
        source = NatsSource(
            f"nats://some:some@{address}?stream=ORDERS&ack_wait=1s",
            consumer="billing",
            topics=[TOPIC],
            poll_interval=SOON,
        )
        async with NatsPublisher(every) as publisher:
            await put(publisher, b"1")
            async with billing(source, database_url) as events:
                lost = await until_outcomes_are_refused(events)
                for event in lost:
                    assert "permissions violation for publish" in event.reason
                    assert "$JS.API.> and $JS.ACK.>" in event.reason
                await put(publisher, b"2")
                await events.wait_for(SourceLost, len(lost) + 2)
                assert len(events.of(MessageHandled)) == 1
                assert not events.of(DuplicateSkipped)

                server.stop()
                server.configure(without_acks(denied=False))
                server.start()
                await events.wait_for(SourceRecovered)
                await events.wait_for(MessageHandled, 2)
        (durable,) = (await ask(every.partition("?")[0], "CONSUMER.LIST.ORDERS"))[
            "consumers"
        ]
        assert (durable["num_pending"], durable["num_ack_pending"]) == (0, 0)


async def test_a_redis_user_that_loses_ack_permission_is_reported_and_fetches_no_more(
    database_url: str, private_redis: RedisServer
) -> None:
    url = private_redis.url
    source = RedisSource(
        url.replace("://", "://some:some@"),
        consumer="billing",
        topics=[TOPIC],
        poll_interval=SOON,
    )
    with Redis.from_url(url, protocol=2) as client:
        client.execute_command("ACL SETUSER some on >some ~* &* +@all")
        async with (
            RedisPublisher(url) as publisher,
            billing(source, database_url) as events,
        ):
            client.execute_command("ACL SETUSER some -xack")
            await put(publisher, b"1")
            lost = await until_outcomes_are_refused(events)
            assert all("'xack' command" in event.reason for event in lost)
            await put(publisher, b"2")
            await events.wait_for(SourceLost, len(lost) + 2)
            assert len(events.of(MessageHandled)) == 1
            pending: Any = client.xpending(TOPIC, "billing")
            assert pending["pending"] == 1

            client.execute_command("ACL SETUSER some +xack")
            await events.wait_for(SourceRecovered)
            await events.wait_for(MessageHandled, 2)
        pending = client.xpending(TOPIC, "billing")
        assert pending["pending"] == 0
