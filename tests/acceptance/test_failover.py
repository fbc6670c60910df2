"""A standby without the end of the log takes over while batches are in flight.

It uses the numbers and the transaction ids of what it lacks again.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from uuid import UUID

import psycopg
import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from pillarbox import Consumer, Message, uuid7
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.lane import bucket_of
from pillarbox.outbox.postgres.connection import conninfo
from pillarbox.outbox.testing.postgres import PostgresServer
from pillarbox.relay.events import LeaseTaken
from tests.acceptance.counter import Base, count
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running, unsettled
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.servers.standby import Standby, either, private_standby

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

ROUNDS = [pytest.param(n, marks=[pytest.mark.variant] if n else []) for n in range(10)]
MESSAGES = 300
GROUPS = 3


@pytest.fixture
def standby(migrated_server: PostgresServer) -> Iterator[Standby]:
    with private_standby(migrated_server.url) as following:
        yield following


def some(topic: str) -> list[Message]:
    return [Message(topic, b"%d" % n, key=f"key-{n % 40}") for n in range(MESSAGES)]


def committed(url: str) -> set[UUID]:
    return {id for (id,) in execute(url, "SELECT id FROM outbox.message")}


async def until_settled(url: str) -> None:
    await asyncio.to_thread(wait_for, "the end", lambda: not unsettled(url))


@pytest.mark.parametrize("round", ROUNDS)
@pytest.mark.parametrize("first", ["application", "relay"])
async def test_what_commits_after_a_failover_is_published(
    first: str, round: int, migrated_server: PostgresServer, standby: Standby
) -> None:
    old, new = migrated_server.url, standby.url
    publisher = ScriptedPublisher()
    async with running(either(old, new), publisher) as relay:
        insert(old, *some("before"))
        await publisher.until_acked(MESSAGES)
        await until_settled(old)
        standby.catch_up(old)
        standby.cut_off()
        publisher.open.clear()
        insert(old, *some("lost"))
        await publisher.until(lambda: publisher.calls[-1][-1].topic == "lost")
        # While this blocks the event loop, the relay doesn't connect again.
        migrated_server.stop("immediate")
        standby.promote()
        if first == "relay":
            await relay.events.wait_for(LeaseTaken, count=2 * GROUPS)
        insert(new, *some("after"))
        publisher.open.set()
        await publisher.until(lambda: publisher.topics().count("after") >= MESSAGES)
        await until_settled(new)

    assert committed(new) <= {message.id for message in publisher.acked}


@pytest.mark.parametrize("round", ROUNDS)
async def test_what_a_failover_loses_of_handlers_is_handled_again(
    round: int, migrated_server: PostgresServer, standby: Standby
) -> None:
    old, new = migrated_server.url, standby.url
    url = either(old, new)
    engine = create_async_engine(
        "postgresql+psycopg://",
        async_creator=partial(psycopg.AsyncConnection.connect, conninfo(url)),
    )
    consumer = Consumer(
        url,
        async_sessionmaker(engine),
        name="counter",
    )
    # Of one lane, so that a batch ends with the slow one.
    quick, slow = [k for k in map(str, range(200)) if bucket_of(k, uuid7()) == 7][:2]
    replicated, promoted = asyncio.Event(), asyncio.Event()

    @consumer.handles("numbers")
    async def handle(session: AsyncSession, message: Message) -> None:
        await count(session, message)
        await (promoted if message.key == slow else replicated).wait()

    def counted(server: str) -> list[tuple[str, int]]:
        return execute(server, "SELECT key, number FROM counted ORDER BY 1, 2")

    messages = [
        Message("numbers", b"%d" % n, key=k) for n in (0, 1) for k in (quick, slow)
    ]
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    with administration(old, application_name="test") as admin:
        add_reader(admin, "counter", ["*"], for_consumer=True, from_oldest=True)
    async with consumer:
        insert(old, *messages)
        standby.catch_up(old)
        standby.cut_off()
        replicated.set()
        both = [(quick, 0), (quick, 1)]
        await asyncio.to_thread(wait_for, "quick", lambda: counted(old) == both)
        migrated_server.stop("immediate")
        standby.promote()
        promoted.set()
        expected = sorted((m.key, int(m.payload)) for m in messages)
        await asyncio.to_thread(wait_for, "all", lambda: counted(new) == expected)
    await engine.dispose()
