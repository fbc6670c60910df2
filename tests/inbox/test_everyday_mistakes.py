"""What a type checker would find is refused where it is written, not hours later."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import (
    Consumer,
    DeadLetter,
    InvalidMessageError,
    Message,
    RetryLater,
    RetryPolicy,
    add,
    event,
    guard,
    insert_statement,
)
from pillarbox.inbox.events import HandlersAbandoned, MessageDeadLettered
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError, NotASessionError, NotMigratedError
from pillarbox.outbox.payload.schema_registry import SchemaRegistry
from pillarbox.outbox.postgres.connection import sqlalchemy_url
from tests.fixtures.consumers import (
    async_sessions_of,
    consuming,
    id_of,
    numbered,
    running,
    sessions_of,
)
from tests.fixtures.sessions import execute

REGISTRY = SchemaRegistry()


@REGISTRY.event("orders.placed")
@dataclass
class PlacedOnce:
    order: int


@REGISTRY.event("orders.placed", version=2)
@dataclass
class Placed:
    order: int


@REGISTRY.event("orders.paid")
@dataclass
class Paid:
    order: int


REGISTRY.register("orders.bulk", list[Placed])


def consumer(**settings: Any) -> Consumer:
    sessions: sessionmaker[Session] = sessionmaker()
    return Consumer(
        MemorySource(), sessions, name="billing", registry=REGISTRY, **settings
    )


def handles(**options: Any) -> object:
    return consumer().handles("orders.placed", **options)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: consumer(retry=3), "retry=3: .* RetryPolicy"),
        (lambda: consumer(drain=3), "drain=3: .* timedelta"),
        (lambda: consumer(max_idle=5), "max_idle=5: .* timedelta"),
        (lambda: consumer(max_in_flight="3"), "max_in_flight='3': .* int"),
        (lambda: consumer(max_waiting=True), "max_waiting=True: .* int"),
        (lambda: consumer(queues=["a"]), "queues=.*: .* Mapping"),
        (lambda: handles(retry=3), "retry=3: .* RetryPolicy"),
        (lambda: handles(time_limit=5), "time_limit=5: .* timedelta"),
        (lambda: handles(permanent="x"), "permanent 'x': isn't an exception"),
        (lambda: RetryPolicy(max_delay=5), "max_delay=5: .* timedelta"),  # type: ignore[arg-type]
        (lambda: RetryPolicy(max_attempts=2.5), "max_attempts=2.5: .* int"),  # type: ignore[arg-type]
        (lambda: RetryLater(5), "delay=5: .* timedelta"),  # type: ignore[arg-type]
        (lambda: event(Paid), r"topic=.*: .* str; write @event\("),  # type: ignore[arg-type]
    ],
)
def test_a_setting_of_another_type_is_refused(
    make: Callable[[], object], field: str
) -> None:
    with pytest.raises(ConfigError, match=field):
        make()


def test_a_decision_without_a_reason_is_one() -> None:
    assert DeadLetter().reason == "requested by the handler"


def test_the_error_for_an_option_beside_a_message_shows_its_value() -> None:
    with Session() as session, pytest.raises(InvalidMessageError, match="key 'x': was"):
        add(session, Message("orders.placed", b""), key="x")


async def test_an_empty_url_is_called_empty() -> None:
    sessions: sessionmaker[Session] = sessionmaker()
    billing = Consumer("", sessions, name="billing")
    billing.handles("*")(lambda session, message: None)
    with pytest.raises(ConfigError, match="the URL of the source is empty; pass one"):
        await billing.run()


def test_a_handler_of_another_topics_or_versions_event_is_refused() -> None:
    def bill(session: Session, order: Paid) -> None: ...
    def ship(session: Session, orders: list[Placed]) -> None: ...

    with pytest.raises(
        ConfigError, match="takes Paid, which is registered for topic 'orders"
    ):
        consumer().handles("orders.placed")(bill)
    placed_once = consumer().handles_batch("orders.placed", max_size=2, version=1)
    with pytest.raises(
        ConfigError, match="in version 1: its handler takes Placed, which"
    ):
        placed_once(ship)

    # Nothing else is registered for these, or the class is one of what is.
    for topic in ("orders.paid", "orders.*", "*", "orders.paid.again"):
        consumer().handles(topic)(bill)
    for version in (None, 2):
        consumer().handles_batch("orders.placed", max_size=2, version=version)(ship)
    consumer().handles("orders.bulk")(ship)


# As in the ini file that `alembic init` writes, whose env.py calls fileConfig.
ALEMBIC = """
import io, logging.config
from sqlalchemy.orm import Session
from pillarbox import Message, add

def lose_a_message():
    with Session() as session:
        add(session, Message("orders.placed", 1))

lose_a_message()  # from now on there is a logger
logging.config.fileConfig(io.StringIO('''
[loggers]
keys = root
[handlers]
keys = console
[formatters]
keys =
[logger_root]
level = WARNING
handlers = console
[handler_console]
class = StreamHandler
args = (sys.stderr,)
'''))
lose_a_message()
"""


def test_a_lost_message_is_logged_though_alembic_has_disabled_all_loggers() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ALEMBIC],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stderr.count("MessagesUnsent messages=1") == 2


async def test_an_awaited_add_is_named_and_the_message_added(database_url: str) -> None:
    async with async_sessions_of(database_url) as sessions, sessions.begin() as session:
        with pytest.raises(NotASessionError, match=r"nothing to await; remove awa"):
            await add(session, Message("t", 1))  # type: ignore[misc]
    assert execute(database_url, "SELECT count(*) FROM outbox.message") == [(1,)]


async def test_a_database_without_the_schema_is_named_with_the_remedy(
    empty_database_url: str,
) -> None:
    refused = pytest.raises(NotMigratedError, match=r"(out|in)box.*; run pillarbox mig")
    message = Message("orders.placed", 1)
    for driver in ("psycopg", "psycopg2"):
        engine = create_engine(
            sqlalchemy_url(empty_database_url).replace("psycopg", driver, 1)
        )
        with Session(engine) as session:
            add(session, message)
            with refused:
                session.commit()
        with engine.connect() as connection, refused:
            connection.execute(insert_statement(message))
        with (
            Session(engine) as session,
            refused,
            guard(session, message.id, consumer="c"),
        ):
            pass
        engine.dispose()
    for driver in ("psycopg", "asyncpg"):
        async with async_sessions_of(empty_database_url, driver) as sessions:
            async with sessions() as session_:
                add(session_, message)
                with refused:
                    await session_.commit()
            async with sessions() as session_:
                with refused:
                    async with guard(session_, message.id, consumer="c"):
                        pass


def test_a_file_that_was_run_twice_is_named() -> None:
    registry = SchemaRegistry()
    for module in ("__main__", "shop"):
        names = {"__name__": module, "event": registry.event, "dataclass": dataclass}
        refused = pytest.raises(
            ConfigError, match=r"__main__\.Placed; .* import its file under one name"
        )
        with refused if module == "shop" else nullcontext():
            exec('@event("orders.placed")\n@dataclass\nclass Placed: ...', names)


async def test_a_stop_that_leaves_a_thread_running_says_so(database_url: str) -> None:
    begun, over = threading.Event(), threading.Event()

    def hang(session: Session, message: Message) -> None:
        begun.set()
        over.wait()

    source = MemorySource(*numbered(1))
    with sessions_of(database_url) as sessions:
        consumer = Consumer(source, sessions, name="stuck", drain=timedelta(0))
        consumer.handles("*")(hang)
        async with running(consumer) as events:
            await asyncio.to_thread(begun.wait)
        over.set()
        for thread in threading.enumerate():
            if thread.name.startswith("inbox stuck"):
                thread.join()
    (left,) = events.of(HandlersAbandoned)
    assert left.handlers == 1


async def test_the_remedy_for_an_old_message_is_in_reason_and_stack_trace(
    database_url: str,
) -> None:
    def handle(session: Session, message: Message) -> None: ...

    old = Message("t", b"", id=id_of(datetime(2020, 1, 1, tzinfo=UTC)))
    async with consuming(database_url, MemorySource(old), handle) as events:
        await events.wait_for(MessageDeadLettered)
    ((reason, trace),) = execute(
        database_url, "SELECT error_reason, error_stacktrace FROM inbox.dead_letter"
    )
    remedy = "handle it manually, or raise the retention of inbox.receipt above the age"
    assert remedy in reason
    assert remedy in trace
