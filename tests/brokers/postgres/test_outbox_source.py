"""Consumers of the postgres broker read the outbox, without a relay."""

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import override

from pillarbox import Consumer, Message, add
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.poison.history import FIRST_DELIVERY, History, TakenOver
from pillarbox.inbox.source import Delivery
from pillarbox.inbox.sources.postgres import PostgresSource
from pillarbox.inbox.sources.postgres.window_lane import MOST_AGAIN
from pillarbox.inbox.testing.source_suite import Capabilities, SourceSuite
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import (
    add_reader,
    drop_reader,
    list_readers,
)
from pillarbox.outbox.errors import BrokerUnavailableError, ConfigError
from pillarbox.outbox.lane import LANES, Priority, lane_of
from pillarbox.outbox.message_id import uuid7
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.relay.publishers.postgres import PostgresPublisher
from pillarbox.relay.relay import Relay
from tests.fixtures.consumers import (
    DRIVERS,
    NEVER,
    POOLS,
    QUICK,
    is_plain,
    numbered,
    running,
    sessions_by,
)
from tests.fixtures.publisher import ScriptedPublisher
from tests.fixtures.readers import add_consumer
from tests.fixtures.relay import UNSETTLED, end_sessions, insert
from tests.fixtures.roles import login, new_role
from tests.fixtures.sessions import execute
from tests.fixtures.sources import payloads, receive_despite_losses
from tests.fixtures.through_proxy import ProxiedUrl
from tests.fixtures.urls import with_options
from tests.fixtures.waiting import wait_for

HOUR = timedelta(hours=1)


class TestPostgresSource(ProxiedUrl, SourceSuite):
    server = "database_url"
    capabilities = Capabilities(
        reads_ahead=True, takes_bytes=False, takes_bytes_as_topic=False
    )
    # A replica that a busy machine delays keeps its lanes.
    hold = 5.0

    @override
    def source(self, consumer: str, topic: str) -> PostgresSource:
        add_consumer(self.direct, consumer, topic)
        return PostgresSource(
            with_options(self.url, lease=timedelta(seconds=self.hold)),
            consumer=consumer,
            topics=[topic],
            poll_interval=timedelta(milliseconds=100),
            leave_timeout=timedelta(seconds=2),
        )

    @override
    async def put(self, *messages: Message) -> None:
        insert(self.direct, *messages)

    @override
    async def put_foreign(self, topic: str, payload: bytes) -> None:
        # A row that no library adds: its id is not a UUIDv7.
        execute(
            self.direct,
            "INSERT INTO outbox.message (id, lane, schema_version, topic, content_type,"
            " payload) VALUES (gen_random_uuid(), 16, 1, %s, 'x/y', %s)",
            [topic, payload],
        )


@pytest.fixture
def sessions(database_url: str) -> Iterator[sessionmaker[Session]]:
    engine = create_engine(sqlalchemy_url(database_url))
    yield sessionmaker(engine)
    engine.dispose()


async def test_a_consumer_handles_what_commits_in_order_without_a_relay(
    database_url: str, sessions: sessionmaker[Session]
) -> None:
    add_consumer(database_url, "billing", "orders.*")
    consumer = Consumer(database_url, sessions, name="billing")
    handled: list[bytes] = []
    done = asyncio.Event()

    @consumer.handles("orders.placed")
    def handle(session: Session, message: Message) -> None:
        session.execute(text("SELECT 1"))
        handled.append(message.payload)
        if len(handled) == 20:
            loop.call_soon_threadsafe(done.set)

    loop = asyncio.get_running_loop()
    async with consumer:
        with sessions.begin() as session:
            for n in range(20):
                add(session, Message("orders.placed", b"%d" % n, key="k"))
            add(session, Message("others", b""))
        async with asyncio.timeout(60):
            await done.wait()
    assert handled == [b"%d" % n for n in range(20)]
    states = "SELECT DISTINCT state FROM outbox.message_status WHERE reader = 'billing'"
    assert execute(database_url, states) == [("handled",)]
    assert execute(database_url, "SELECT count(*) FROM inbox.receipt") == [(20,)]


@pytest.mark.parametrize("fails", [False, True], ids=["waits", "fails"])
async def test_a_handler_that_waits_or_fails_holds_up_no_lane_claimed_with_its_own(
    database_url: str, fails: bool
) -> None:
    add_consumer(database_url, "billing")
    engine = create_async_engine(sqlalchemy_url(database_url), pool_size=LANES)
    consumer = Consumer(
        database_url,
        async_sessionmaker(engine),
        name="billing",
        max_in_flight=LANES,
        retry=NEVER,
    )
    begun: asyncio.Queue[str] = asyncio.Queue()
    end = asyncio.Event()
    keys = {
        lane_of(key, uuid7(), Priority.DEFAULT): key for key in map(str, range(200))
    }
    slow, *others = keys.values()

    @consumer.handles("t")
    async def handle(session: AsyncSession, message: Message) -> None:
        assert message.key is not None
        await begun.put(message.key)
        if message.key == slow:
            if fails:
                raise LookupError
            await end.wait()

    async with consumer, asyncio.timeout(60):
        insert(database_url, *(Message("t", b"", key=key) for key in keys.values()))
        assert {await begun.get() for _ in keys} == set(keys.values())
        insert(database_url, *(Message("t", b"", key=key) for key in others))
        assert {await begun.get() for _ in others} == set(others)
        end.set()
    await engine.dispose()


async def test_a_small_prefetch_does_not_make_due_messages_wait_for_a_poll(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing")
    due = datetime.now(UTC) + timedelta(seconds=1)
    scheduled = [Message("t", b"", key="k", available_at=due) for _ in range(30)]
    insert(database_url, *scheduled)
    source = PostgresSource(
        with_options(database_url, prefetch=8), consumer="billing", topics=["t"]
    )
    received = 0
    # A poll for each message would take longer.
    async with source, asyncio.timeout(20):
        while received < len(scheduled):
            for delivery in await source.receive(limit=10):
                assert delivery.message.available_at == due
                received += 1
                await delivery.ack()


HOW: dict[str, Callable[[Delivery], Awaitable[object]]] = {
    "fails": lambda delivery: delivery.nack(timedelta(0)),
    "is returned": lambda delivery: delivery.nack(),
    "is handed back": lambda delivery: delivery.hand_back(timedelta(0)),
}


@pytest.mark.parametrize("how", HOW)
async def test_no_message_starts_if_an_earlier_one_of_its_key_waits_meanwhile(
    how: str, database_url: str
) -> None:
    add_consumer(database_url, "billing")
    source = PostgresSource(database_url, consumer="billing", topics=["*"])
    insert(database_url, *numbered(5))
    started = []
    async with source, asyncio.timeout(60):
        # At first none is in the log, then all are.
        for each in (how, "fails", how, "fails", how, *[None] * 5):
            while not (received := await source.receive(limit=1)):
                pass
            started += payloads(received)
            await (HOW[each](received[0]) if each else received[0].ack())
    assert started == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]


def in_lane_of(key: str) -> Iterator[str]:
    """Yield other keys of the lane of a key."""
    lane = lane_of(key, uuid7(), Priority.DEFAULT)
    for other in map(str, count()):
        if lane_of(other, uuid7(), Priority.DEFAULT) == lane and other != key:
            yield other


async def receive_next(source: PostgresSource, topic: str) -> Delivery:
    """Receive one message, and check its topic."""
    (delivery,) = await receive_despite_losses(source, 1, limit=1)
    assert delivery.message.topic == topic
    return delivery


async def until(url: str, query: str, *expected: object) -> None:
    """Wait until a query returns these values, one in each row."""
    rows = [(value,) for value in expected]
    await asyncio.to_thread(
        wait_for, query, lambda: execute(url, query) == rows, seconds=50
    )


CAUSES = "SELECT cause FROM outbox.deferral ORDER BY entry"
STORED = "SELECT count(*) FROM outbox.message_status WHERE state = 'handled'"


async def test_a_message_is_logged_as_open_as_soon_as_one_behind_it_has_to_be_logged(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing")
    source = PostgresSource(database_url, consumer="billing", topics=["*"])
    other = next(in_lane_of("k"))
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    insert(
        database_url,
        Message("slow", b"", key="k"),
        Message("later", b"", key=other, available_at=tomorrow),
        Message("next", b"", key="k"),
    )
    async with source, asyncio.timeout(60):
        slow = await receive_next(source, "slow")
        following = await receive_next(source, "next")
        await until(database_url, CAUSES, "scheduled", "open")
        await slow.ack()
        await until(database_url, CAUSES, "scheduled", "open", "settled")
        await following.ack()
        await until(database_url, STORED, 2)


async def test_a_message_is_logged_as_open_after_so_many_have_ended_behind_it(
    database_url: str,
) -> None:
    add_consumer(database_url, "billing")
    source = PostgresSource(database_url, consumer="billing", topics=["*"])
    other = next(in_lane_of("k"))
    quick = [Message("quick", b"", key=other) for _ in range(MOST_AGAIN)]
    insert(database_url, Message("slow", b"", key="k"), *quick)
    async with source, asyncio.timeout(60):
        slow = await receive_next(source, "slow")
        for _ in quick[1:]:
            await (await receive_next(source, "quick")).ack()
        assert execute(database_url, CAUSES) == []
        await (await receive_next(source, "quick")).ack()
        await until(database_url, CAUSES, "open")
        await until(database_url, STORED, MOST_AGAIN)
        await slow.ack()
        await until(database_url, STORED, MOST_AGAIN + 1)


@pytest.mark.parametrize("part", ["lease", "shared"])
async def test_a_message_whose_handler_runs_is_not_started_again_after_a_lost_session(
    part: str, database_url: str
) -> None:
    add_consumer(database_url, "billing")
    source = PostgresSource(
        database_url,
        consumer="billing",
        topics=["*"],
        poll_interval=timedelta(milliseconds=100),
    )
    other = next(in_lane_of("k"))
    first, second = (Message(topic, b"", key="k") for topic in ("first", "second"))
    insert(database_url, first, second)
    async with source, asyncio.timeout(60):
        running = await receive_next(source, "first")
        following = await receive_next(source, "second")
        end_sessions(database_url, part)
        # It is claimed behind them, in the lane that was read again.
        insert(database_url, Message("other", b"", key=other))
        await (await receive_next(source, "other")).ack()
        await running.ack()
        await following.ack()
        # Another process may have had the lane, or the server lost what they have done.
        # The third message comes again if it was acked before the loss was noticed.
        again: list[str] = []
        while execute(database_url, STORED) != [(3,)]:
            with suppress(BrokerUnavailableError):
                for delivery in await source.receive(limit=1):
                    again.append(delivery.message.topic)
                    await delivery.ack()
        assert [topic for topic in again if topic != "other"] == ["first", "second"]


FALLS = (
    *(f"SELECT setval('outbox.message_seq', last_value - {by})" for by in (1, 3, 400)),
    "SELECT setval('outbox.message_seq', 1, false)",
)


@pytest.mark.parametrize("fall", FALLS)
async def test_a_sequence_that_falls_and_catches_up_before_a_claim_loses_nothing(
    fall: str, database_url: str
) -> None:
    add_consumer(database_url, "billing")
    source = PostgresSource(
        database_url, consumer="billing", topics=["t"], poll_interval=HOUR
    )
    async with source, asyncio.timeout(60):
        insert(database_url, *(Message("t", b"", key="k") for _ in range(500)))
        await receive(source, 500)
        execute(
            database_url,
            f"{fall} FROM outbox.message_seq; SELECT outbox.add('t', '{{}}'::jsonb,"
            " key => 'k', tenant => 'again') FROM generate_series(1, 505)",
        )
        tenants: Counter[str | None] = Counter()
        while tenants["again"] < 505:
            # What isn't settled yet when the sequence falls comes again.
            tenants += await receive(source, 1)
        assert tenants["again"] == 505


async def receive(source: PostgresSource, count: int) -> Counter[str | None]:
    """Receive and ack so many deliveries; return how many each tenant has got."""
    tenants: Counter[str | None] = Counter()
    while tenants.total() < count:
        for delivery in await source.receive(limit=100):
            tenants[delivery.message.tenant] += 1
            await delivery.ack()
    return tenants


ADD_REPORT = "SELECT outbox.add('reports', '{}'::jsonb, tenant => %s)"


async def receive_for_ever(source: PostgresSource) -> None:
    while True:
        await source.receive(limit=1)


async def test_a_reader_that_is_given_to_relays_is_reported(database_url: str) -> None:
    add_consumer(database_url, "billing")
    source = PostgresSource(database_url, consumer="billing", topics=["t"])
    async with source, asyncio.timeout(60):
        execute(database_url, "UPDATE outbox.reader SET broker = 'kafka://elsewhere'")
        with pytest.raises(BrokerUnavailableError, match="kafka://elsewhere"):
            await receive_for_ever(source)


async def test_only_what_was_there_at_the_takeover_may_have_been_started_before(
    database_url: str,
) -> None:
    await check_histories(database_url)


async def check_histories(database_url: str) -> None:
    """Check what a replica believes of a message from before, and of a new one."""
    add_consumer(database_url, "billing")
    insert(database_url, Message("old", b"", key="k"))
    source = PostgresSource(database_url, consumer="billing", topics=["*"])
    histories: dict[str, History | None] = {}
    async with source, asyncio.timeout(60):
        while len(histories) < 2:
            for delivery in await source.receive(limit=10):
                histories[delivery.message.topic] = delivery.history
                await delivery.ack()
                if delivery.message.topic == "old":
                    insert(database_url, Message("new", b"", key="k"))
    assert isinstance(histories["old"], TakenOver)
    assert histories["new"] is FIRST_DELIVERY


@pytest.mark.parametrize("driver", [*DRIVERS, *POOLS])
async def test_a_consumers_role_needs_the_rights_of_its_own_reader_only(
    database_url: str, driver: str
) -> None:
    in_roles = "LOGIN IN ROLE pillarbox_reader, pillarbox_consumer"
    with new_role(database_url, "bob", in_roles):
        add_consumer(database_url, "billing", "orders.*", role="bob")
        add_consumer(database_url, "audit")
        url = login(database_url, "bob")
        async with sessions_by(url, driver) as sessions:
            with pytest.raises(ConfigError, match="reader=audit: role bob may not run"):
                async with running(
                    handling(Consumer(url, sessions, name="audit"), driver)
                ):
                    pass
            consumer = Consumer(url, sessions, name="billing", retry=QUICK)
            topics = ("orders.bad", "orders.good", "orders.last")
            due = datetime.now(UTC) + timedelta(seconds=1)
            async with running(handling(consumer, driver)) as events:
                insert(
                    database_url,
                    *(Message(topic, b"", key="k") for topic in topics),
                    Message("orders.late", b"", key="k", available_at=due),
                )
                await events.wait_for(MessageHandled, 3)
                await events.wait_for(MessageDeadLettered)
    counted = (
        "SELECT count(*) FROM inbox.receipt",
        "SELECT count(*) FROM inbox.dead_letter WHERE topic = 'orders.bad'",
        "SELECT count(*) FROM outbox.unsettled_message WHERE reader = 'billing'",
    )
    assert [execute(database_url, query) for query in counted] == [
        *([(3,)], [(1,)], [(0,)])
    ]
    others = "SELECT DISTINCT reader FROM outbox.position WHERE reader <> 'billing'"
    assert execute(database_url, others) == []


async def test_a_consumers_first_start_adds_a_reader_that_only_its_role_may_run(
    database_url: str,
) -> None:
    def source(role: str, *topics: str) -> PostgresSource:
        url = login(database_url, role)
        return PostgresSource(url, consumer="billing", topics=topics)

    in_roles = "LOGIN IN ROLE pillarbox_reader, pillarbox_consumer"
    with (
        new_role(database_url, "bob", in_roles),
        new_role(database_url, "eve", in_roles),
    ):
        async with source("bob", "orders") as bobs, asyncio.timeout(60):
            insert(database_url, Message("orders", b"", tenant="bob"))
            assert await receive(bobs, 1) == {"bob": 1}
        for state in ("is open", "is dropped"):
            with pytest.raises(ConfigError, match="reader=billing: role eve may not"):
                async with source("eve", "orders", state):
                    pass
            with administration(database_url, application_name="test") as connection:
                (billing,) = list_readers(connection, "billing")
                assert (billing.topics, billing.role) == (["orders"], "bob")
                if state == "is open":
                    drop_reader(connection, "billing")
        async with source("bob", "orders", "refunds"):
            pass


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_errors_at_the_start_name_the_grants_to_paste(
    database_url: str, driver: str
) -> None:
    with new_role(database_url, "bob"):
        url = login(database_url, "bob")
        async with sessions_by(url, driver) as sessions:
            for role in ("consumer", "reader"):
                with pytest.raises(ConfigError, match=f"_{role}") as refused:
                    await handling(Consumer(url, sessions, name="b"), driver).run()
                grant = re.search('GRANT pillarbox_.*? TO "bob"', str(refused.value))
                assert grant is not None, refused.value
                execute(database_url, grant[0])
            async with running(handling(Consumer(url, sessions, name="b"), driver)):
                pass


def handling(consumer: Consumer, driver: str) -> Consumer:
    """Add a handler, plain or not, that fails for the topic `orders.bad`."""

    def fail(message: Message) -> None:
        if message.topic == "orders.bad":
            raise LookupError

    if is_plain(driver):

        @consumer.handles("orders.*")
        def handle(_: Any, message: Message) -> None:
            fail(message)

    else:

        @consumer.handles("orders.*")
        async def handle_async(_: Any, message: Message) -> None:
            fail(message)

    return consumer


@pytest.mark.parametrize(
    "name", ["Billing", "two words", "ä" * 256, "billing--reports", "o'hara", "-x"]
)
async def test_a_consumer_has_a_reader_from_its_first_start_whatever_its_name(
    database_url: str, name: str
) -> None:
    insert(database_url, Message("orders", b"", tenant="before"))
    async with (
        asyncio.timeout(60),
        PostgresSource(database_url, consumer=name, topics=["orders"]) as source,
    ):
        insert(database_url, Message("orders", b"", tenant="after"))
        insert(database_url, Message("others", b"", tenant="others"))
        assert await receive(source, 1) == {"after": 1}
    with administration(database_url, application_name="test") as connection:
        (reader,) = list_readers(connection, name)
    assert (reader.topics, reader.messages) == (["orders"], 0)


async def test_a_newer_replica_adds_its_topics_and_an_older_one_passes_none_of_them(
    database_url: str,
) -> None:
    """The older one owns all lanes."""

    def replica(*topics: str) -> PostgresSource:
        return PostgresSource(database_url, consumer="billing", topics=topics)

    async with asyncio.timeout(60), replica("orders") as old:
        insert(database_url, Message("reports", b"", tenant="before"))
        with psycopg.connect(database_url) as writer:
            writer.execute(ADD_REPORT, ("open",))
            insert(database_url, Message("orders", b"", tenant="orders"))
            assert await receive(old, 1) == {"orders": 1}
            async with replica("orders", "reports", "orders.*"):
                pass
            insert(database_url, Message("reports", b"", tenant="after"))
            assert await receive(old, 1) == {"after": 1}
            writer.commit()
        assert await receive(old, 1) == {"open": 1}
    with administration(database_url, application_name="test") as connection:
        (reader,) = list_readers(connection, "billing")
    assert reader.topics == ["orders", "orders.*", "reports"]


async def test_a_consumer_begins_at_the_oldest_message_of_a_topic_that_nobody_has_had(
    unread_database_url: str,
) -> None:
    url = unread_database_url

    async def consume(consumer: str, *topics: str, tenants: str) -> None:
        source = PostgresSource(url, consumer=consumer, topics=topics)
        async with asyncio.timeout(60), source:
            insert(url, Message(topics[0], b"", tenant="after"))
            received = await receive(source, len(tenants.split()))
        assert received == Counter(tenants.split())

    for topic in ("orders.paid", "refunds", "reports"):
        insert(url, Message(topic, b"", tenant=topic))
    with psycopg.connect(url) as writer:
        writer.execute(ADD_REPORT, ("open",))
        await consume("billing", "orders.paid", tenants="orders.paid after")
        # Of each other reader that has had a part of its topics, even if it is gone.
        await consume("audit", "orders.*", "refunds", tenants="refunds after")
        with administration(url, application_name="test") as connection:
            drop_reader(connection, "audit", discard=True)
        await consume("late", "refunds", tenants="after")
        writer.commit()
    await consume("reports", "reports", tenants="reports open after")


async def test_a_topic_that_nobody_has_had_is_added_with_its_messages_in_order(
    unread_database_url: str,
) -> None:
    """The older replica has passed them in all lanes, and has one in flight."""
    url = unread_database_url

    def replica(*topics: str) -> PostgresSource:
        return PostgresSource(
            url,
            consumer="billing",
            topics=topics,
            poll_interval=timedelta(milliseconds=50),
        )

    async with asyncio.timeout(90), replica("orders") as old:
        others = [b"of %d" % n for n in range(16)]
        insert(url, *(Message("reports", it, key=it.decode()) for it in others))
        insert(url, *(Message("reports", b"%d" % n, key="k") for n in range(3)))
        insert(url, Message("orders", b"first", key="k"))
        in_flight: Sequence[Delivery] = ()
        while not in_flight:
            in_flight = await old.receive(limit=1)
        with psycopg.connect(url) as writer:
            writer.execute(ADD_REPORT, ("open",))
            async with replica("orders", "reports") as new:
                insert(url, Message("reports", b"3", key="k"))
                writer.commit()
                insert(url, Message("orders", b"last", key="other"))
                for delivery in in_flight:
                    await delivery.ack()
                all_payloads = {b"0", b"1", b"2", b"3", b"last", b"{}", *others}
                seen: list[tuple[str | None, bytes]] = []
                while not all_payloads <= {payload for _, payload in seen}:
                    for source in (old, new):
                        for delivery in await source.receive(limit=20):
                            message = delivery.message
                            # The older one has no handler for it.
                            if source is old and message.topic == "reports":
                                await delivery.hand_back(timedelta(milliseconds=1))
                                continue
                            seen.append((message.key, message.payload))
                            await delivery.ack()
    ordered = [payload for key, payload in dict.fromkeys(seen) if key == "k"]
    assert [it for it in ordered if it != b"first"] == [b"0", b"1", b"2", b"3"]
    await until(url, UNSETTLED, 0)


async def test_readers_add_decides_beforehand_where_a_consumer_begins(
    unread_database_url: str,
) -> None:
    url = unread_database_url
    insert(url, Message("orders", b"", tenant="before"))
    with administration(url, application_name="test") as connection:
        for name, from_oldest in (("now", False), ("oldest", True)):
            add_reader(
                connection, name, ["orders"], for_consumer=True, from_oldest=from_oldest
            )
    insert(url, Message("orders", b"", tenant="after"))
    for name, tenants in (("now", ["after"]), ("oldest", ["before", "after"])):
        source = PostgresSource(url, consumer=name, topics=["orders"])
        async with asyncio.timeout(60), source:
            assert await receive(source, len(tenants)) == Counter(tenants)


async def test_a_dropped_consumer_returns_for_what_is_new(database_url: str) -> None:
    async def fail_with(tenant: str) -> None:
        source = PostgresSource(database_url, consumer="billing", topics=["orders"])
        received: Sequence[Delivery] = ()
        async with asyncio.timeout(60), source:
            insert(database_url, Message("orders", b"", tenant=tenant, key="k"))
            while not received:
                received = await source.receive(limit=10)
            (delivery,) = received
            assert delivery.message.tenant == tenant
            await delivery.nack(delay=HOUR)

    await fail_with("before")
    with administration(database_url, application_name="test") as connection:
        drop_reader(connection, "billing", discard=True)
        insert(database_url, Message("orders", b"", tenant="between", key="k"))
        await fail_with("after")
        (reader,) = list_readers(connection, "billing")
    assert reader.messages == 1


async def test_names_of_relays_readers_and_of_consumers_are_kept_apart(
    database_url: str,
) -> None:
    async def refuse(consumer: str, reason: str) -> None:
        with pytest.raises(ConfigError, match=reason):
            async with PostgresSource(
                database_url, consumer=consumer, topics=["orders"]
            ):
                pass

    await refuse(
        "main", r"reader=main: already used by relays, .* give the consumer an"
    )
    add_consumer(database_url, "audit", broker="redis://a")
    await refuse(
        "audit", r"reader=audit: already used by relays, .*publish to redis://a/0"
    )
    with administration(database_url, application_name="test") as connection:
        add_reader(connection, "ignored", ["old"], discard=True)
        for name in ("main", "audit"):
            drop_reader(connection, name)
    await refuse("ignored", "reader=ignored: exists, and discards its messages")
    await refuse("audit", "reader=audit: already used by relays")
    await refuse("main", "reader=main: already used by relays")
    with (
        administration(database_url, application_name="test") as connection,
        pytest.raises(ConfigError, match="reader=main: belongs to relays"),
    ):
        add_reader(connection, "main", ["*"], for_consumer=True)
    with administration(database_url, application_name="test") as connection:
        add_reader(connection, "main", ["*"], broker="redis://a")
        (main,) = list_readers(connection, "main")
    assert (main.broker, main.dropped_at) == ("redis://a/0", None)
    async with PostgresSource(database_url, consumer="billing", topics=["orders"]):
        for switch in (False, True):
            relay = Relay(
                database_url,
                ScriptedPublisher(),
                reader="billing",
                broker="redis://a",
                switch_broker=switch,
            )
            with pytest.raises(ConfigError, match="billing: already used by the con"):
                await relay.run()


@pytest.mark.parametrize(
    ("option", "remedy"),
    [
        ("direct=true", "direct: omit it"),
        ("inbox=true", "inbox: omit it.* run the previous version"),
        ("unsubscribed=drop", "unsubscribed: omit it.* readers add .* --discard"),
    ],
)
def test_a_former_option_is_refused_with_the_remedy(option: str, remedy: str) -> None:
    url = f"postgresql://host/name?{option}"
    with pytest.raises(ConfigError, match=remedy):
        PostgresSource.from_url(url, consumer="billing", topics=["orders"])
    with pytest.raises(ConfigError, match=remedy):
        PostgresPublisher(url)
