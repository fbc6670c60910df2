"""A handler's idle transaction is terminated, and the message is handled again."""

import asyncio
from collections import defaultdict
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import pytest
from psycopg import AsyncConnection as AsyncPsycopg
from psycopg import Connection as Psycopg
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Consumer, Message
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerDatabaseLost,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.outbox.testing.events import RecordedEvents
from tests.fixtures.consumers import DRIVERS as EVERY_DRIVER
from tests.fixtures.consumers import (
    NEVER,
    POOLS,
    QUICK,
    async_sessions_of,
    consuming,
    is_plain,
    numbered,
    running,
    sessions_of,
)
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.effects import EFFECT, effects
from tests.fixtures.jobs import LEASE
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn
from tests.fixtures.waiting import wait_for

SECOND: Final = timedelta(seconds=1)
IDLE: Final = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND state = 'idle in transaction'
"""
LIMIT: Final = text("SHOW idle_in_transaction_session_timeout")
DRIVERS: Final = ("psycopg async", "asyncpg")
BRIEF: Final = timedelta(milliseconds=1)


async def wait_until_none_is_idle(url: str) -> None:
    await asyncio.to_thread(
        wait_for, "it is ended", lambda: execute(url, IDLE) == [(0,)]
    )


def consumer_of(sessions: Any, *messages: Message, **settings: Any) -> Consumer:
    given: Any = {"name": "billing", "retry": NEVER, "max_idle": SECOND, **settings}
    return Consumer(MemorySource(*messages), sessions, **given)


def idling(
    url: str, message: Message, handler: Any, terms: Any = None, **settings: Any
) -> AbstractAsyncContextManager[RecordedEvents]:
    """Run a consumer whose transactions can be idle for a second."""
    given: dict[str, Any] = {"retry": QUICK, "max_idle": SECOND, **settings}
    return consuming(url, MemorySource(message), handler, terms, **given)


@pytest.mark.parametrize(
    ("batch", "uses_it_again", "driver"), in_turn([None, 2], [False, True], DRIVERS)
)
async def test_after_a_takeover_the_late_process_commits_nothing(
    url: str, batch: int | None, uses_it_again: bool, driver: str
) -> None:
    message = Message("orders", b"1")
    begun, thawed = asyncio.Event(), asyncio.Event()

    async def stall(session: AsyncSession, _: Any) -> None:
        await session.execute(EFFECT, {"what": "late"})
        begun.set()
        await thawed.wait()
        if uses_it_again:
            await session.execute(EFFECT, {"what": "later"})

    async def take_over(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "taken over"})

    terms = {"batch": batch}
    async with idling(url, message, stall, terms, driver=driver) as of_late:
        await begun.wait()
        async with idling(url, message, take_over) as of_taker:
            await of_taker.wait_for(MessageHandled)
        thawed.set()
        await of_late.wait_for(DuplicateSkipped)

    assert effects(url) == ["taken over"]
    assert of_late.of(HandlerDatabaseLost) == []
    (failed,) = of_late.of(HandlerFailed)
    assert "idle for longer than max_idle=1s" in failed.reason


async def test_a_session_terminated_while_its_connection_is_open_has_failed(
    url: str, proxy: MakeProxy
) -> None:
    server, through = proxy(url)
    starts = 0

    async def handle(session: AsyncSession, message: Message) -> None:
        nonlocal starts
        starts += 1
        await session.execute(EFFECT, {"what": f"start {starts}"})
        if starts == 1:
            server.hold_close()
            await wait_until_none_is_idle(url)
            try:
                await session.execute(EFFECT, {"what": "later"})
            finally:
                server.forward_close()

    async with idling(through, Message("orders", b"1"), handle) as events:
        await events.wait_for(MessageHandled)

    assert effects(url) == ["start 2"]
    assert events.of(HandlerDatabaseLost) == []
    (failed,) = events.of(HandlerFailed)
    assert "max_idle=1s" in failed.reason


@pytest.mark.parametrize(
    ("driver", "terms"), in_turn([*EVERY_DRIVER, *POOLS], [{}, {"batch": 2}])
)
async def test_each_call_that_outlives_the_idle_limit_is_an_attempt_that_names_it(
    terms: dict[str, Any], driver: str, url: str
) -> None:
    calls: list[int] = []

    async def handle(session: AsyncSession, _: Any) -> None:
        calls.append(len(calls))
        await wait_until_none_is_idle(url)
        if len(calls) == 1:
            await session.execute(text("SELECT 1"))

    async def handle_in_pool(connection: AsyncPsycopg, _: Any) -> None:
        calls.append(len(calls))
        await wait_until_none_is_idle(url)
        if len(calls) == 1:
            await connection.execute("SELECT 1")

    def handle_in_thread(session: Session, _: Any) -> None:
        calls.append(len(calls))
        wait_for("it is ended", lambda: execute(url, IDLE) == [(0,)])
        if len(calls) == 1:
            session.execute(text("SELECT 1"))

    def handle_in_plain_pool(connection: Psycopg, _: Any) -> None:
        calls.append(len(calls))
        wait_for("it is ended", lambda: execute(url, IDLE) == [(0,)])
        if len(calls) == 1:
            connection.execute("SELECT 1")

    in_loop = handle_in_pool if driver in POOLS else handle
    in_thread = handle_in_plain_pool if driver in POOLS else handle_in_thread
    handler: Any = in_thread if is_plain(driver) else in_loop
    twice = RetryPolicy(max_attempts=2, first_delay=BRIEF)
    (message,) = numbered(1)
    async with idling(
        url, message, handler, terms, driver=driver, retry=twice
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert len(calls) == given_up.attempts == 2
    assert events.of(HandlerDatabaseLost) == []
    for reason in (given_up.reason, events.of(HandlerFailed)[0].reason):
        assert "idle for longer than max_idle=1s" in reason


async def test_a_statement_can_take_longer_than_the_idle_limit(url: str) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(text("SELECT pg_sleep(1.5)"))
        await session.execute(EFFECT, {"what": "done"})

    async with idling(url, Message("orders", b"1"), handle) as events:
        await events.wait_for(MessageHandled)
    assert events.of(HandlerDatabaseLost) == []
    assert effects(url) == ["done"]


async def note(session: AsyncSession, _: Any) -> None:
    await session.execute(EFFECT, {"what": await session.scalar(LIMIT)})


def note_in_thread(session: Session, _: Any) -> None:
    session.execute(EFFECT, {"what": session.scalar(LIMIT)})


HANDLERS: Final[list[Any]] = [
    pytest.param(note, {}, id="one"),
    pytest.param(note, {"batch": 2}, id="batch"),
    pytest.param(note_in_thread, {}, id="plain"),
    pytest.param(note_in_thread, {"batch": 2}, id="plain batch"),
]
LIMITS: Final[list[Any]] = [
    pytest.param(timedelta(seconds=90), "90s", id="90s"),
    pytest.param(None, "5s", id="none"),
]


@pytest.mark.parametrize(
    ("handler", "terms", "max_idle", "said"), in_turn(HANDLERS, LIMITS)
)
async def test_the_idle_limit_applies_to_every_kind_of_handler(
    url: str, handler: Any, terms: Any, max_idle: timedelta | None, said: str
) -> None:
    execute(
        url,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET "
        "idle_in_transaction_session_timeout = ''5s''', current_database()); END $$",
    )
    (message,) = numbered(1)
    async with idling(url, message, handler, terms, max_idle=max_idle) as events:
        await events.wait_for(MessageHandled)
    assert effects(url) == [said]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_the_idle_limit_ends_with_its_transaction(url: str, driver: str) -> None:
    give_up(url, *numbered(1), schema="inbox")
    async with async_sessions_of(url, driver) as sessions:
        consumer = consumer_of(sessions)
        consumer.handles("orders")(note)
        await retry(consumer.retrier())
        assert effects(url) == ["1s"]
        async with sessions() as session:
            assert await session.scalar(LIMIT) == "0"


async def test_a_job_idle_in_a_transaction_is_restarted(url: str) -> None:
    begun: list[int] = []

    async def handle(job: AsyncJob, message: Message) -> None:
        begun.append(job.attempts)
        async with job.transaction() as session:
            await session.execute(EFFECT, {"what": f"start {len(begun)}"})
            if len(begun) == 1:
                await wait_until_none_is_idle(url)

    message, terms = Message("orders", b"1"), {"lease": LEASE}
    async with idling(url, message, handle, terms) as events:
        await events.wait_for(MessageHandled)
    assert begun == [1, 2]
    assert effects(url) == ["start 2"]
    (failed,) = events.of(HandlerFailed)
    assert "max_idle=1s" in failed.reason


def note_in_job(job: Job, _: Message) -> None:
    with job.transaction() as session:
        note_in_thread(session, job.message)
    job.save(1)
    with job.finish() as session:
        note_in_thread(session, job.message)


def fail_in_job(job: Job, _: Message) -> None:
    raise RuntimeError


@pytest.mark.parametrize(
    ("handler", "outcome", "noted"),
    [(note_in_job, MessageHandled, ["1s", "1s"]), (fail_in_job, HandlerFailed, [])],
)
async def test_the_idle_limit_applies_to_every_transaction_of_a_job(
    url: str, handler: Any, outcome: type[MessageHandled], noted: list[str]
) -> None:
    seen: defaultdict[object, list[str]] = defaultdict(list)

    def note(connection: Connection, what: str) -> None:
        seen[connection.connection.dbapi_connection].append(what)

    with sessions_of(url) as made:
        engine = made.kw["bind"]
        event.listen(engine, "begin", lambda connection: note(connection, "BEGIN"))
        event.listen(
            engine,
            "before_cursor_execute",
            lambda *arguments: note(arguments[0], arguments[2]),
        )
        consumer = consumer_of(made, Message("orders", b"1"))
        consumer.job("orders", lease=LEASE)(handler)
        async with running(consumer) as events:
            await events.wait_for(outcome)

    # Checked per connection, because their transactions run concurrently.
    started = [
        then for one in seen.values() for this, then in pairwise(one) if this == "BEGIN"
    ]
    # With one statement each.
    others = (
        "outbox.alembic_version",
        "make_days()",
        "inbox.beat(",
        "Identify the database",
    )
    inbox, rights, *first = (s for s in started if not any(it in s for it in others))
    assert inbox.startswith("SELECT 1 FROM inbox.receipt")
    assert "has_table_privilege" in rights
    assert len(first) > 2
    assert [s for s in first if not s.startswith("SELECT set_config")] == []
    assert effects(url) == noted


async def test_dead_lettering_sets_its_timeout_before_it_takes_the_lock(
    url: str,
) -> None:
    seen: dict[Any, list[str]] = defaultdict(list)

    def note(connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        seen[connection.connection.dbapi_connection].append(statement)

    with sessions_of(url) as made:
        event.listen(made.kw["bind"], "before_cursor_execute", note)
        unknown = Message("unknown", b"1")
        consumer = consumer_of(made, unknown, rollout=timedelta(0))
        consumer.handles("orders")(note_in_thread)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)

    pairs = [two for statements in seen.values() for two in pairwise(statements)]
    ((before, _),) = [two for two in pairs if "advisory" in two[1]]
    assert before.startswith("SELECT set_config")
