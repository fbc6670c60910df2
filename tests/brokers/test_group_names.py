"""Renamed consumers and two services with one name are reported at their start."""

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest

from pillarbox.inbox.consumer import Consumer
from pillarbox.inbox.events import MessageHandled, SourceWarned
from pillarbox.inbox.sources.kafka import KafkaSource
from pillarbox.inbox.sources.nats import NatsSource
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.inbox.sources.redis import RedisSource
from tests.fixtures.consumers import numbered, running, sessions_by
from tests.fixtures.real_kafka import RealKafka
from tests.fixtures.sessions import execute
from tests.fixtures.sources import publish, receive
from tests.fixtures.waiting import wait_for

pytestmark = pytest.mark.timeout(240)
SOON = timedelta(milliseconds=50)


@pytest.fixture(params=["redis", "nats", "kafka"])
def broker(request: pytest.FixtureRequest) -> tuple[str, str, Callable[..., Any]]:
    """The URL of a broker, a topic of its own there, and its kind of source."""
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        return url, f"orders.{uuid4().hex}", RedisSource
    if request.param == "nats":
        server = request.getfixturevalue("shared_nats")
        stream = request.getfixturevalue("nats_topics")
        return server.url, f"{stream}.{uuid4().hex}", NatsSource
    node: RealKafka = request.getfixturevalue("real_node")
    topic = f"orders.{uuid4().hex}"
    node.create_topic(topic, partitions=2)
    wait_for("its coordinators", lambda: are_loaded(node))
    return node.url, topic, KafkaSource


def are_loaded(node: RealKafka) -> bool:
    """Return whether a Kafka that has just started can describe groups."""
    admin = node.admin  # its answers never come if it is gone
    answers = admin.describe_consumer_groups(["none"], request_timeout=10)
    return answers["none"].exception(20) is None


async def test_a_new_group_says_once_that_it_begins_at_the_oldest_message(
    broker: tuple[str, str, Callable[..., Any]],
) -> None:
    url, topic, kind = broker
    await publish(url, *numbered(1204, topic=topic))
    group = f"billing-{uuid4().hex}"

    def member() -> Any:
        return kind(url, consumer=group, topics=[topic], poll_interval=SOON)

    async with member() as first:
        (warning,) = first.abilities.warnings()
        assert f"new consumer group {group} starts at the oldest of 1,204" in warning
        for delivery in await receive(first, 1):
            await delivery.ack()
    async with member() as second:
        assert not second.abilities.warnings()


async def test_a_group_that_is_new_where_nothing_is_old_says_nothing(
    broker: tuple[str, str, Callable[..., Any]],
) -> None:
    url, topic, kind = broker
    group = f"billing-{uuid4().hex}"
    async with kind(url, consumer=group, topics=[topic], poll_interval=SOON) as member:
        assert not member.abilities.warnings()


async def test_members_carry_the_id_of_their_handlers_database(
    broker: tuple[str, str, Callable[..., Any]],
) -> None:
    url, topic, kind = broker
    group = f"billing-{uuid4().hex}"

    def member(id: str) -> Any:
        made = kind(url, consumer=group, topics=[topic], poll_interval=SOON)
        for _ in range(2):  # as when a start is tried again
            made.abilities.identify(id)
        return made

    async with member("db-a1a1a1a1") as first:
        assert await first.receive(limit=1) == []
        async with member("db-b2b2b2b2") as second:
            names = second.abilities.members()
    if kind is NatsSource:
        assert not names  # NATS shows no members
    else:
        (name,) = [it for it in names if it.endswith("-db-a1a1a1a1")]
        assert name.count("-db-") == 1


async def test_members_on_postgres_are_seen_as_long_as_they_run(
    database_url: str,
) -> None:
    def member(id: str) -> Any:
        made = PostgresSource(database_url, consumer="billing", topics=["orders"])
        made.abilities.identify(id)
        return made

    async with asyncio.timeout(60), member("db-a1a1a1a1") as first:
        async with member("db-b2b2b2b2") as second:
            while len(first.abilities.members()) < 2:
                assert await first.receive(limit=1) == []
            names = [*first.abilities.members(), *second.abilities.members()]
            assert "pillarbox db-a1a1a1a1 inbox billing lease" in names
            assert "pillarbox db-b2b2b2b2 inbox billing lease" in names
        while len(first.abilities.members()) > 1:
            assert await first.receive(limit=1) == []


async def test_a_group_that_two_services_share_is_a_finding_in_their_databases(
    database_url: str, redis_url: str
) -> None:
    other = RedisSource(redis_url, consumer="billing", topics=["orders"])
    other.abilities.identify("db-a1a1a1a1")
    async with other, sessions_by(database_url, "asyncpg") as sessions:
        assert await other.receive(limit=1) == []
        replicas = [Consumer(redis_url, sessions, name="billing") for _ in range(2)]
        for consumer in replicas:
            consumer.handles("orders")(handle)
        async with running(replicas[0]), running(replicas[1]) as events:
            (warning,) = await events.wait_for(SourceWarned)
            assert "-db-a1a1a1a1 uses another database" in warning.reason

            def found() -> bool:
                query = "SELECT reason FROM inbox.process"
                reasons = [reason for (reason,) in execute(database_url, query)]
                return reasons == [warning.reason] * 2

            await asyncio.to_thread(wait_for, "the reason", found)
        assert events.of(SourceWarned) == [warning]


async def test_a_member_that_may_not_know_its_database_takes_nobody_for_a_stranger(
    database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(_: object) -> str:
        return ""

    monkeypatch.setattr("pillarbox.inbox.consumer.member_id", refused)
    other = RedisSource(redis_url, consumer="billing", topics=["orders"])
    other.abilities.identify("db-a1a1a1a1")
    other.abilities.share()
    async with other, sessions_by(database_url, "asyncpg") as sessions:
        assert await other.receive(limit=1) == []
        consumer = Consumer(redis_url, sessions, name="billing", order="none")
        consumer.handles("orders")(handle)
        await publish(redis_url, *numbered(100, keys=100))
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 10)
        assert not events.of(SourceWarned)


async def handle(session: Any, message: Any) -> None:
    """Handle a message."""
