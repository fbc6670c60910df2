"""Receipts go where effects go, with sessions that choose an engine by the statement.

The routers decide as those of SQLAlchemy's documentation ("Custom Vertical
Partitioning") and of advanced-alchemy's `RoutingSyncSession`.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Final
from uuid import uuid4

import pytest
from sqlalchemy import Delete, Insert, Update, text
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.ext.horizontal_shard import ShardedSession
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import override

from pillarbox import (
    AsyncJob,
    ConfigError,
    Consumer,
    Job,
    Message,
    guard,
)
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.handlers.sessions import pool_limit
from pillarbox.inbox.schema import metadata
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.dead_letters.criteria import Criteria
from pillarbox.outbox.dead_letters.retry import retry_all
from pillarbox.outbox.events import Event
from tests.fixtures.consumers import (
    DRIVERS,
    QUICK,
    handles,
    is_plain,
    running,
    sessions_by,
)
from tests.fixtures.dead_letters import find
from tests.fixtures.endings import Effect, dead_letters, effects, make_effects, receipts
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn

ROUTERS: Final = {
    "SQLAlchemy's recipe": (Update, Delete),
    "advanced-alchemy": (Insert, Update, Delete),
}
FAILS_ONCE: Final = """
DO $$
BEGIN
    FOR n IN 0..5 LOOP
        EXECUTE format('CREATE SEQUENCE tries_%s', n);
    END LOOP;
END $$;
CREATE FUNCTION fail_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('tries_' || NEW.what) = 1 THEN
        RAISE EXCEPTION 'this COMMIT fails';
    END IF;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER fails_once AFTER INSERT ON effect
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION fail_once();
"""
"""The first COMMIT of each effect fails: a sequence survives the rollback."""
PARTITIONS: Final = """
SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
 WHERE inhparent = 'inbox.receipt'::regclass AND relname NOT LIKE '%default'
 ORDER BY relname
"""


@pytest.fixture
def url(database_url: str) -> str:
    make_effects(database_url)
    return database_url


@asynccontextmanager
async def routed(
    url: str, driver: str, writes: Any, *, reader: str | None = None
) -> AsyncIterator[Any]:
    """Yield sessions that write to `url`, and read from `reader` by its own engine."""
    async with (
        sessions_by(url, driver) as writing,
        sessions_by(reader or url, driver, {"pool_size": 1}) as reading,
    ):
        writer, follower = (
            getattr(each.kw["bind"], "sync_engine", each.kw["bind"])
            for each in (writing, reading)
        )

        class Routing(Session):
            @override
            def get_bind(self, mapper: Any = None, clause: Any = None) -> Any:  # type: ignore[override]
                if self._flushing or isinstance(clause, writes):
                    return writer
                return follower

        if is_plain(driver):
            yield sessionmaker(class_=Routing)
        else:
            yield async_sessionmaker(sync_session_class=Routing)


@pytest.fixture
def reader(url: str) -> Iterator[str]:
    """Yield the URL of a reader that can also write."""
    role = f"reader_{uuid4().hex}"
    execute(url, f"CREATE ROLE {role} LOGIN SUPERUSER")
    yield url.replace("postgres@", f"{role}@")
    execute(url, f"DROP ROLE {role}")


@pytest.fixture
def replica(reader: str) -> str:
    """A URL whose sessions can only read, as those of a standby."""
    role = reader.partition("://")[2].partition("@")[0]
    execute(reader, f"ALTER ROLE {role} SET default_transaction_read_only = on")
    return reader


def handler_of(driver: str, do: Any) -> Any:
    """Return a handler that calls `do` with a session and each of its messages."""

    def handle(session: Session, given: Any) -> None:
        for message in given if isinstance(given, list) else [given]:
            do(session, message)

    def handle_plain(given: Any, messages: Any) -> None:
        if isinstance(given, Job):
            with given.finish() as session:
                handle(session, messages)
        else:
            handle(given, messages)

    async def handle_async(given: Any, messages: Any) -> None:
        if isinstance(given, AsyncJob):
            async with given.finish() as session:
                await session.run_sync(handle, messages)
        else:
            await given.run_sync(handle, messages)

    return handle_plain if is_plain(driver) else handle_async


KINDS: Final[dict[str, dict[str, Any]]] = {
    "single": {},
    "batch": {"batch": 2},
    "job": {"lease": timedelta(seconds=60)},
}


def register(consumer: Consumer, kind: str, driver: str, do: Any) -> None:
    """Register a handler of this kind for all topics."""
    handles(consumer, "*", **KINDS[kind])(handler_of(driver, do))


CASES: Final = [
    pytest.param(*case, id="-".join(case))
    for case in (
        ("psycopg", "job"),
        ("psycopg2", "batch"),
        ("psycopg async", "single"),
        ("asyncpg", "single"),
    )
]
WRITES: Final = [pytest.param(writes, id=name) for name, writes in ROUTERS.items()]
"""The statements that a router sends to the writer, besides flushes."""
CASES_AND_ROUTERS: Final = pytest.mark.parametrize(
    ("driver", "kind", "writes"),
    [
        *in_turn(CASES, WRITES),
        *(
            pytest.param(
                *case, ROUTERS[name], id=f"{case}-{name}", marks=pytest.mark.variant
            )
            for case in (
                ("psycopg", "single"),
                ("asyncpg", "batch"),
                ("asyncpg", "job"),
            )
            for name in ROUTERS
        ),
    ],
)
DRIVERS_AND_ROUTERS: Final = pytest.mark.parametrize(
    ("driver", "writes"), in_turn(["psycopg", "asyncpg"], WRITES)
)
EACH_ROUTER: Final = pytest.mark.parametrize("writes", WRITES)


async def settle(
    sessions: Any, driver: str, kind: str, do: Any, *messages: Message
) -> list[Event]:
    """Handle messages until each is settled; return what was reported."""
    source = MemorySource(*messages)
    consumer = Consumer(source, sessions, name="billing", retry=QUICK)
    register(consumer, kind, driver, do)
    unsettled = len(messages)
    settled = asyncio.Event()

    def note(event: Event) -> None:
        nonlocal unsettled
        if isinstance(event, MessageHandled | DuplicateSkipped | MessageDeadLettered):
            unsettled -= 1
            if not unsettled:
                settled.set()

    consumer.observe(note)
    async with running(consumer) as events:
        await settled.wait()
    return events.events


def numbered(count: int) -> list[Message]:
    return [Message("orders", b"", key=f"{n}") for n in range(count)]


def write(session: Session, message: Message) -> None:
    session.add(Effect(str(message.key)))


def read(session: Session, *_: object) -> None:
    session.execute(text("SELECT what FROM effect")).all()


def read_and_write(session: Session, message: Message) -> None:
    read(session)
    write(session, message)


@CASES_AND_ROUTERS
async def test_a_commit_that_fails_undoes_receipt_and_effects_together(
    url: str, driver: str, kind: str, writes: Any
) -> None:
    execute(url, FAILS_ONCE)
    # Before, each had an even chance to keep only its receipt.
    messages = numbered(6)

    async with routed(url, driver, writes) as sessions:
        await settle(sessions, driver, kind, write, *messages)

    assert effects(url) == [message.key for message in messages]
    assert receipts(url) == len(messages)


@DRIVERS_AND_ROUTERS
async def test_the_guards_receipt_commits_with_what_is_flushed(
    url: str, driver: str, writes: Any
) -> None:
    execute(url, FAILS_ONCE)

    async with routed(url, driver, writes) as sessions:
        for done, message in enumerate(numbered(6)):
            with pytest.raises(Exception, match="this COMMIT fails"):
                await guarded(sessions, driver, message, write)
            assert receipts(url) == done
            await guarded(sessions, driver, message, write)

    assert (len(effects(url)), receipts(url)) == (6, 6)


async def guarded(sessions: Any, driver: str, message: Message, do: Any) -> None:
    if is_plain(driver):
        with sessions.begin() as session, guard(session, message.id, consumer="c"):
            do(session, message)
        return
    async with (
        sessions.begin() as session,
        guard(session, message.id, consumer="c"),
    ):
        await session.run_sync(do, message)


@CASES_AND_ROUTERS
async def test_a_second_connection_that_can_write_is_refused_by_name(
    url: str, reader: str, driver: str, kind: str, writes: Any
) -> None:
    def write_and_hide_the_refusal(session: Session, message: Message) -> None:
        write(session, message)
        session.flush()
        try:
            read(session)
        except ConfigError:
            return
        raise AssertionError("the read was not refused")

    async with routed(url, driver, writes, reader=reader) as sessions:
        seen = await settle(
            sessions, driver, kind, write_and_hide_the_refusal, *numbered(1)
        )

    assert any(isinstance(event, HandlerFailed) for event in seen)
    ((reason, _),) = dead_letters(url)
    assert reason.startswith(
        "ConfigError: the session would write through two connections"
    )
    assert all(each.partition("://")[2] in reason for each in (url, reader))
    assert "default_transaction_read_only" in reason
    assert (effects(url), receipts(url)) == ([], 0)


@DRIVERS_AND_ROUTERS
async def test_the_guard_refuses_a_block_that_reads_where_it_could_write(
    url: str, driver: str, writes: Any
) -> None:
    (message,) = numbered(1)
    async with routed(url, driver, writes) as sessions:
        with pytest.raises(ConfigError, match="through two connections"):
            await guarded(sessions, driver, message, read_and_write)

    assert (effects(url), receipts(url)) == ([], 0)


@EACH_ROUTER
async def test_what_a_block_reads_after_the_guard_is_refused_at_the_commit(
    url: str, writes: Any
) -> None:
    (message,) = numbered(1)
    async with routed(url, "psycopg", writes) as sessions:
        session = sessions()
        with guard(session, message.id, consumer="c"):
            write(session, message)
        with pytest.raises(ConfigError, match="through two connections"):
            read(session)
        with pytest.raises(ConfigError, match="through two connections"):
            session.commit()
        session.close()

    assert (effects(url), receipts(url)) == ([], 0)


@CASES_AND_ROUTERS
async def test_handlers_may_read_from_a_replica(
    url: str, replica: str, driver: str, kind: str, writes: Any
) -> None:
    partitions = execute(url, PARTITIONS)
    execute(url, f"DROP TABLE inbox.{partitions[-1][0]}")
    async with routed(url, driver, writes, reader=replica) as sessions:
        seen = await settle(sessions, driver, kind, read_and_write, *numbered(2))

    assert execute(url, PARTITIONS) == partitions
    assert effects(url) == ["0", "1"]
    assert receipts(url) == 2
    assert not [event for event in seen if isinstance(event, HandlerFailed)]
    assert not [event for event in seen if event.level >= logging.WARNING]


@CASES_AND_ROUTERS
async def test_dead_letters_and_their_retries_need_only_the_writer(
    url: str, replica: str, driver: str, kind: str, writes: Any
) -> None:
    is_repaired = False

    def fail_at_first(session: Session, message: Message) -> None:
        read_and_write(session, message)
        if not is_repaired:
            raise ValueError("not yet")

    async with routed(url, driver, writes, reader=replica) as sessions:
        (message,) = numbered(1)
        consumer = Consumer(
            MemorySource(message), sessions, name="billing", retry=QUICK
        )
        register(consumer, kind, driver, fail_at_first)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)
        is_repaired = True
        async with consumer.retrier() as retrier:
            await retry_all(retrier, await find(retrier, Criteria()))

    assert (effects(url), receipts(url)) == (["0"], 1)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_sessions_without_an_engine_for_receipts_are_refused_with_the_remedy(
    url: str, driver: str
) -> None:
    async with sessions_by(url, driver) as sessions:
        engine = sessions.kw["bind"]
        sessions.configure(bind=None, binds={Effect: engine})
        consumer = Consumer(MemorySource(), sessions, name="billing")
        register(consumer, "single", driver, write)

        with pytest.raises(ConfigError, match=r"no engine is bound .* binds="):
            await consumer.run()
        with pytest.raises(ConfigError, match=r"no engine is bound .* binds="):
            await guarded(sessions, driver, numbered(1)[0], write)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_inboxs_tables_can_be_bound_like_any_others(
    url: str, driver: str
) -> None:
    async with sessions_by(url, driver) as sessions:
        engine = sessions.kw["bind"]
        tables = dict.fromkeys(metadata.tables.values(), engine)
        sessions.configure(bind=None, binds={Effect: engine, **tables})

        await settle(sessions, driver, "single", write, *numbered(1))

    assert (effects(url), receipts(url)) == (["0"], 1)


async def test_a_sharded_session_is_refused_with_the_remedy(url: str) -> None:
    async with sessions_by(url, "psycopg") as plain:
        sessions: sessionmaker[Any] = sessionmaker(
            class_=ShardedSession,
            shards={"one": plain.kw["bind"]},
            shard_chooser=lambda *_: "one",
            identity_chooser=lambda *_, **__: ["one"],
            execute_chooser=lambda _: ["one"],
        )
        consumer = Consumer(MemorySource(), sessions, name="billing")
        register(consumer, "single", "psycopg", write)

        with pytest.raises(ConfigError, match="pass a session factory for the inbox"):
            await consumer.run()
        with pytest.raises(ConfigError, match="pass a session factory for the inbox"):
            await guarded(sessions, "psycopg", numbered(1)[0], write)


async def test_asking_a_router_for_its_engine_changes_nothing_in_the_context(
    url: str,
) -> None:
    has_written = ContextVar("has_written", default=False)

    async with sessions_by(url, "psycopg") as writing:

        class Sticky(Session):
            @override
            def get_bind(self, mapper: Any = None, clause: Any = None) -> Any:  # type: ignore[override]
                if self._flushing:
                    has_written.set(True)
                return writing.kw["bind"]

        assert pool_limit(sessionmaker(class_=Sticky)) is not None

    assert not has_written.get()
