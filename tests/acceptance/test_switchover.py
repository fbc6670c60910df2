"""After a switchover, processes work on the new primary, although sockets stay open."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from pillarbox import Message, uuid7
from pillarbox.inbox.events import HandlerFailed, MessageHandled
from pillarbox.inbox.source import Source
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.errors import BrokerUnavailableError
from pillarbox.relay.publisher import Acked
from pillarbox.relay.publishers.postgres import PostgresPublisher
from tests.acceptance.brokers import outbox
from tests.acceptance.counters import IMPATIENT, Counters
from tests.acceptance.inspection import Inspection
from tests.acceptance.relays import Relays
from tests.acceptance.sink import Sink
from tests.acceptance.writer import Writer
from tests.fixtures.consumers import (
    DRIVERS,
    NEVER,
    POOLS,
    consuming,
    is_plain,
    numbered,
)
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.relay import insert, running, unsettled
from tests.fixtures.sessions import execute
from tests.fixtures.switchover import HOW, Pair, pair
from tests.fixtures.urls import with_options
from tests.fixtures.waiting import answer_after, wait_for, wait_until_none

__all__ = ["pair"]

LEASE = timedelta(seconds=2)
OPTIONS = ("--batch-size=20", "--concurrency=2", "--lease=2s")
QUICKLY = timedelta(milliseconds=100)


async def test_a_relay_publishes_what_the_new_primary_has(pair: Pair) -> None:
    publisher = ScriptedPublisher()
    async with running(pair.url, publisher, lease=LEASE):
        insert(pair.url, Message("before", b""))
        await asyncio.to_thread(wait_for, "settled", lambda: not unsettled(pair.url))
        await asyncio.to_thread(pair.switch)
        after = [Message("after", b"", id=uuid7()) for _ in range(50)]
        insert(pair.url, *after)
        ids = {message.id for message in after}
        # What was acked just before is published again if it couldn't be settled.
        await publisher.until(lambda: ids <= {m.id for m in publisher.acked})


async def available(call: Callable[[], Awaitable[Any]]) -> Any:
    """Call until the database is available."""
    async with asyncio.timeout(90):
        while True:
            try:
                # As the relay limits what it asks a publisher.
                async with asyncio.timeout(5):
                    return await call()
            except (BrokerUnavailableError, TimeoutError):
                await answer_after(0.1)


async def receive(source: Source, count: int) -> None:
    """Receive and ack messages until this many have arrived."""
    arrived: set[object] = set()
    async with asyncio.timeout(90):
        while len(arrived) < count:
            for delivery in await available(lambda: source.receive(limit=10)):
                arrived.add(delivery.message.id)
                await delivery.ack()


async def test_a_publisher_of_the_postgres_broker_uses_the_new_primary(
    pair: Pair,
) -> None:
    async with PostgresPublisher(pair.url) as publisher:

        async def publish(message: Message) -> None:
            send = partial(publisher.publish, [message])
            assert await available(send) == [Acked()]

        await publish(Message("orders", b""))
        await asyncio.to_thread(pair.switch)
        for message in numbered(20, keys=20):
            await publish(message)
    added = "SELECT count(DISTINCT id) FROM outbox.message"
    assert execute(pair.url, added) == [(21,)]


async def test_a_source_that_reads_the_outbox_reads_that_of_the_new_primary(
    pair: Pair,
) -> None:
    with administration(pair.url, application_name="test") as connection:
        add_reader(connection, "billing", ["*"], for_consumer=True, from_oldest=True)
    url = with_options(pair.url, lease=LEASE)
    async with PostgresSource(
        url, consumer="billing", topics=["orders"], poll_interval=QUICKLY
    ) as source:
        insert(pair.url, Message("orders", b""))
        await receive(source, 1)
        await asyncio.to_thread(pair.switch)
        insert(pair.url, *numbered(20, keys=20))
        await receive(source, 20)


async def handle(session: object, handled: object) -> None:
    pass


def handle_plain(session: object, handled: object) -> None:
    pass


KINDS = [(how, driver) for how in HOW for driver in (*DRIVERS, *POOLS)]
FIRST = [("read-only", "pool"), ("hanging", "psycopg2"), ("hanging", "asyncpg")]


@pytest.mark.parametrize(
    "terms",
    [{}, pytest.param({"batch": 5}, marks=pytest.mark.variant)],
    ids=["one", "batch"],
)
@pytest.mark.parametrize(
    ("pair", "driver"),
    [
        pytest.param(*kind, marks=() if kind in FIRST else pytest.mark.variant)
        for kind in KINDS
    ],
    indirect=["pair"],
)
async def test_handlers_run_on_the_new_primary(
    pair: Pair, driver: str, terms: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.outbox.observability.presence.INTERVAL", 0.1)
    source = MemorySource()
    handler = handle_plain if is_plain(driver) else handle
    async with consuming(
        pair.url,
        source,
        handler,
        terms,
        driver=driver,
        retry=NEVER,
        max_idle=timedelta(seconds=5),
    ) as events:
        source.add(*numbered(10, keys=10))
        await events.wait_for(MessageHandled, 10)
        await asyncio.to_thread(pair.switch)
        source.add(*numbered(20, keys=20))
        await events.wait_for(MessageHandled, 30)
    assert events.of(HandlerFailed) == []


@pytest.mark.fault
@pytest.mark.timeout(900)
class TestSwitchoversWithMessagesInFlight:
    @pytest.fixture
    def database_url(self, pair: Pair) -> str:
        """Replace the database on the shared server."""
        return pair.url

    def test_relays_lose_no_message_and_keep_keys_in_order(
        self, pair: Pair, relays: Relays, slow_sink: Sink, writer: Writer, full: bool
    ) -> None:
        for _ in range(2):
            relays.start(slow_sink.url, *OPTIONS, INTERVALS="answer=3")
        for number in range(10 if full else 1):
            if number:
                pair.add_standby()
            before = slow_sink.count()
            writer.add(400)
            slow_sink.wait_for_count(before + 1)
            pair.switch()
            writer.reconnect()
            writer.add(200)
            slow_sink.wait_for_count(writer.added)
            wait_for("settled", lambda: not unsettled(pair.url))
        assert slow_sink.numbers() == writer.numbers()

    # A statement of a handler that has begun waits for ever on a server that hangs.
    @pytest.mark.parametrize("pair", ["read-only"], indirect=True)
    def test_consumers_of_the_outbox_handle_each_message_once_and_in_order(
        self,
        pair: Pair,
        counters: Counters,
        writer: Writer,
        inspection: Inspection,
        full: bool,
    ) -> None:
        broker = outbox(pair.url)
        url = with_options(broker.url, lease=LEASE)
        for _ in range(2):
            counters.start(url, IMPATIENT, INTERVALS="answer=3")
        for number in range(10 if full else 1):
            if number:
                pair.add_standby()
            before = counters.count()
            writer.add(400)
            counters.wait_for_count(before + 1)
            pair.switch()
            for client in (writer, inspection):
                client.reconnect()
            writer.add(200)
            counters.wait_for_count(writer.added)
            wait_until_none("messages wait", broker.waiting)
        counters.expect_each_once(writer.numbers())
