"""Before it starts, a consumer checks its role's privileges and its connection pool."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, Self
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy import create_engine, event, text
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool, StaticPool
from typing_extensions import override

from pillarbox import Consumer, Message, add, guard, idempotent
from pillarbox.inbox.events import MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.webhook import WebhookApp
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.errors import (
    BrokerUnavailableError,
    ConfigError,
    DatabaseRefusedError,
    DatabaseUnavailableError,
)
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from pillarbox.outbox.testing.lifetime import free_port
from pillarbox.outbox.testing.postgres import PostgresServer
from tests.acceptance.relays import as_role
from tests.fixtures.consumers import (
    DRIVERS,
    POOLS,
    async_sessions_of,
    consuming,
    handles,
    is_plain,
    running,
    sessions_by,
)
from tests.fixtures.dead_letters import find
from tests.fixtures.passwords import ask_for_passwords, set_password
from tests.fixtures.sessions import execute

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
RECEIPT = "INSERT ON inbox.receipt"
DEAD_LETTER = "INSERT ON inbox.dead_letter"
SUSPECT = "DELETE ON inbox.suspect"
JOB = "UPDATE ON inbox.job"
LONG = {"lease": timedelta(seconds=5)}


def plain(session: Session, message: Message) -> None: ...
async def coroutine(session: AsyncSession, message: Message) -> None: ...
async def long(job: Any, message: Message) -> None: ...
async def many(session: AsyncSession, messages: Any) -> None: ...


def consumer_of(sessions: Any, handler: Any = coroutine, **changes: Any) -> Consumer:
    terms = {name: changes.pop(name) for name in ("lease", "batch") if name in changes}
    consumer = Consumer(MemorySource(), sessions, name="billing", **changes)
    handles(consumer, "orders", **terms)(handler)
    return consumer


@pytest.fixture
def reader(database_url: str) -> Iterator[str]:
    """Yield the URL of a role that can read the inbox and do little else."""
    role = f"reader_{uuid4().hex}"
    execute(database_url, f"CREATE ROLE {role} LOGIN")
    execute(database_url, f"GRANT USAGE ON SCHEMA inbox, outbox TO {role}")
    execute(
        database_url, f"GRANT SELECT ON ALL TABLES IN SCHEMA inbox, outbox TO {role}"
    )
    yield database_url.replace("postgres@", f"{role}@")
    execute(database_url, f"DROP OWNED BY {role}")
    execute(database_url, f"DROP ROLE {role}")


@pytest.mark.parametrize(
    ("driver", "handler", "terms"),
    [
        ("psycopg", plain, {}),
        ("psycopg async", coroutine, {}),
        ("asyncpg", coroutine, {}),
        ("asyncpg", long, LONG),
    ],
)
async def test_a_role_that_cannot_write_what_its_handlers_need_is_refused(
    reader: str, driver: str, handler: Any, terms: dict[str, Any]
) -> None:
    async with sessions_by(reader, driver) as sessions:
        with pytest.raises(ConfigError, match="GRANT pillarbox_consumer TO") as refused:
            await consumer_of(sessions, handler, **terms).run()

    said = str(refused.value)
    assert "the role 'reader_" in said
    assert all(lacking in said for lacking in (RECEIPT, DEAD_LETTER, SUSPECT))
    assert (JOB in said) == (handler is long)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    ("statement", "remedy"),
    [
        ("ALTER SCHEMA inbox RENAME TO elsewhere", "has no schema inbox: run"),
        ("REVOKE USAGE ON SCHEMA inbox FROM PUBLIC, {role}", "GRANT pillarbox_con"),
    ],
    ids=["schema", "right"],
)
async def test_every_driver_names_what_the_inbox_lacks(
    database_url: str, reader: str, driver: str, statement: str, remedy: str
) -> None:
    role = reader.partition("://")[2].partition("@")[0]
    execute(database_url, statement.format(role=role))
    handler = plain if is_plain(driver) else coroutine

    async with sessions_by(reader, driver) as sessions:
        with pytest.raises(ConfigError, match=remedy):
            await consumer_of(sessions, handler).run()


class AwayAtFirst(MemorySource):
    """A source whose broker is unavailable the first time."""

    was_away = False

    @override
    async def __aenter__(self) -> Self:
        if not self.was_away:
            self.was_away = True
            raise BrokerUnavailableError("the broker is away")
        return await super().__aenter__()


@asynccontextmanager
async def unopened(url: str, driver: str) -> AsyncIterator[Any]:
    """Yield sessions, or a pool that the consumer opens."""
    if driver in POOLS:
        kind = ConnectionPool if is_plain(driver) else AsyncConnectionPool
        yield kind(url, min_size=1, max_size=4, open=False)
        return
    async with sessions_by(url, driver) as sessions:
        yield sessions


def plain_of_any(first: Any, message: Message) -> None: ...
async def coroutine_of_any(first: Any, message: Message) -> None: ...


@pytest.mark.parametrize("driver", [*DRIVERS, *POOLS])
async def test_a_consumer_that_could_not_start_can_run_again(
    database_url: str, driver: str
) -> None:
    source = AwayAtFirst(Message("orders", b""))
    async with unopened(database_url, driver) as sessions:
        consumer = Consumer(source, sessions, name="billing", max_in_flight=1)
        handler = plain_of_any if is_plain(driver) else coroutine_of_any
        consumer.handles("orders")(handler)
        with pytest.raises(BrokerUnavailableError):
            await consumer.run()
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)


@pytest.mark.parametrize("driver", [*DRIVERS, *POOLS])
async def test_a_refused_password_of_the_url_is_told_from_an_outage(
    migrated_server: PostgresServer, driver: str
) -> None:
    ask_for_passwords(migrated_server.url, "mary")
    mary = set_password(migrated_server.url, "mary", "new").replace(":new@", ":old@")
    away = mary.replace(str(urlsplit(mary).port), str(free_port()))
    for url, kind in (
        (mary, DatabaseRefusedError),
        (away, DatabaseUnavailableError),
        (mary.replace("mary:old@", "nobody@"), DatabaseUnavailableError),
    ):
        async with unopened(url, driver) as sessions:
            handler = plain_of_any if is_plain(driver) else coroutine_of_any
            consumer = consumer_of(sessions, handler, max_in_flight=1)
            with pytest.raises(DatabaseUnavailableError) as raised:
                await consumer.run()
        assert type(raised.value) is kind


async def test_a_password_that_the_application_gives_each_connection_may_change(
    migrated_server: PostgresServer,
) -> None:
    ask_for_passwords(migrated_server.url, "mary")
    mary = set_password(migrated_server.url, "mary", "new").replace(":new@", ":old@")
    engine = create_engine(sqlalchemy_url(mary))

    @event.listens_for(engine, "do_connect")
    def rotate(dialect: Any, record: Any, arguments: Any, parameters: Any) -> None:
        parameters["password"] = "expired"

    with pytest.raises(DatabaseUnavailableError) as raised:
        await consumer_of(sessionmaker(engine), plain).run()
    assert type(raised.value) is DatabaseUnavailableError
    engine.dispose()


async def test_the_consumers_role_passes_the_check(database_url: str) -> None:
    async with async_sessions_of(as_role(database_url, "pillarbox_consumer")) as it:
        async with running(consumer_of(it)):
            pass
        async with running(consumer_of(it, long, **LONG)):
            pass


async def test_read_only_transactions_are_refused(database_url: str) -> None:
    url = f"{database_url}?options=-cdefault_transaction_read_only%3Don"
    async with async_sessions_of(url) as sessions:
        with pytest.raises(ConfigError, match="transactions are read-only"):
            await consumer_of(sessions).run()


@pytest.mark.parametrize(
    ("handler", "settings", "problem"),
    [
        (
            plain,
            {"max_in_flight": 64},
            r"max_in_flight=64: needs 64 connections.* at most 15 \(pool_size=5, "
            r"max_overflow=10\).* set max_in_flight=15",
        ),
        (
            long,
            {"max_in_flight": 15, **LONG},
            "needs 16 connections.* set max_in_flight=14",
        ),
    ],
)
async def test_more_in_flight_than_connections_is_refused_with_both_numbers(
    handler: Any, settings: dict[str, Any], problem: str, database_url: str
) -> None:
    driver = "psycopg" if handler is plain else "asyncpg"
    async with sessions_by(database_url, driver) as sessions:
        with pytest.raises(ConfigError, match=problem):
            await consumer_of(sessions, handler, **settings).run()


@pytest.mark.parametrize(
    ("pool", "handler", "settings"),
    [
        ({}, coroutine, {"max_in_flight": 15}),
        ({}, long, {"max_in_flight": 14, **LONG}),
        ({}, long, LONG),
        ({}, many, {"batch": 100, "max_in_flight": 200}),
        ({"poolclass": NullPool}, coroutine, {"max_in_flight": 64}),
        ({"pool_size": 0}, coroutine, {"max_in_flight": 64}),
        ({"max_overflow": -1}, coroutine, {"max_in_flight": 64}),
        ({"pool_size": 64, "max_overflow": 0}, coroutine, {"max_in_flight": 64}),
    ],
)
async def test_a_pool_that_is_large_enough_is_accepted(
    pool: dict[str, Any], handler: Any, settings: dict[str, Any], database_url: str
) -> None:
    async with (
        sessions_by(database_url, "psycopg async", pool) as sessions,
        running(consumer_of(sessions, handler, **settings)),
    ):
        pass


async def test_one_connection_for_all_handlers_is_refused(database_url: str) -> None:
    pool = {"poolclass": StaticPool}
    async with sessions_by(database_url, "psycopg", pool) as sessions:
        with pytest.raises(ConfigError, match=r"at most 1 \(StaticPool\)"):
            await consumer_of(sessions, plain, max_in_flight=2).run()


async def test_the_default_limits_fit_the_pool(database_url: str) -> None:
    at_work: set[UUID] = set()
    most = 0
    is_full = asyncio.Event()

    async def handle(session: AsyncSession, message: Message) -> None:
        nonlocal most
        at_work.add(message.id)
        most = max(most, len(at_work))
        if most >= 14:
            is_full.set()
        await is_full.wait()
        # By the time the server answers, every handler that can start has started.
        await session.execute(text("SELECT 1"))
        at_work.discard(message.id)

    source = MemorySource(*(Message("orders", b"") for _ in range(60)))
    async with consuming(database_url, source, handle) as events:
        await events.wait_for(MessageHandled, 60)
    assert most == 14


def test_a_webhook_checks_its_pool_too(database_url: str) -> None:
    engine = create_engine(sqlalchemy_url(database_url))
    sessions = sessionmaker(engine)
    WebhookApp(plain, sessions, name="billing", secrets=[SECRET])
    with pytest.raises(ConfigError, match="max_in_flight=64: needs 64 connections"):
        WebhookApp(plain, sessions, name="b", secrets=[SECRET], max_in_flight=64)


class UnknownDialect(PGDialect_psycopg):
    """A dialect whose driver the inbox doesn't know; it connects like psycopg."""

    driver = "pg8000"
    supports_statement_cache = True


registry.register("postgresql.unknown", __name__, "UnknownDialect")


@pytest.fixture
def unknown_driver(database_url: str) -> Iterator[sessionmaker[Session]]:
    """Yield sessions of a driver that the inbox doesn't know."""
    url = sqlalchemy_url(database_url).replace("+psycopg", "+unknown", 1)
    engine = create_engine(url)
    yield sessionmaker(engine)
    engine.dispose()


KNOWN = r"driver 'pg8000' .* use one of psycopg, psycopg2, asyncpg"


async def test_a_driver_that_the_inbox_does_not_know_is_refused(
    unknown_driver: sessionmaker[Session],
) -> None:
    message, handle = Message("t", b""), idempotent(consumer="c")(plain)
    with pytest.raises(ConfigError, match=KNOWN):
        await consumer_of(unknown_driver, plain).run()
    async with consumer_of(unknown_driver, plain).retrier() as retrier:
        with pytest.raises(ConfigError, match=KNOWN):
            await find(retrier, Criteria())
    with unknown_driver.begin() as session, pytest.raises(ConfigError, match=KNOWN):
        guard(session, message.id, consumer="c").__enter__()
    with unknown_driver.begin() as session, pytest.raises(ConfigError, match=KNOWN):
        handle(session, message)
    with (
        Session(create_engine("sqlite://")) as session,
        pytest.raises(ConfigError, match="of sqlite; use one of"),
    ):
        guard(session, message.id, consumer="c").__enter__()


def test_the_writer_works_with_any_driver(
    unknown_driver: sessionmaker[Session], database_url: str
) -> None:
    with unknown_driver.begin() as session:
        add(session, Message("t", b""))

    assert execute(database_url, "SELECT topic FROM outbox.message") == [("t",)]
