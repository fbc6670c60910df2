"""A handler's idle transaction is terminated, and the message is handled again."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, Final

import pytest
from sqlalchemy import Connection, event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session

from inbox.events import (
    DuplicateSkipped,
    HandlerDatabaseLost,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.jobs.job import AsyncJob, Job
from inbox.sources.memory import MemorySource
from pillarbox import Consumer, Message, idempotent
from tests.fixtures.consumers import (
    NEVER,
    async_sessions_of,
    handles,
    numbered,
    running,
    sessions_of,
)
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.jobs import LEASE
from tests.fixtures.proxy import MakeProxy
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for

SECOND: Final = timedelta(seconds=1)
EFFECT: Final = text("INSERT INTO effect (what) VALUES (:what)")
IDLE: Final = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND state = 'idle in transaction'
"""
LIMIT: Final = text("SHOW idle_in_transaction_session_timeout")


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


@pytest.fixture(params=["psycopg", "asyncpg"])
async def sessions(
    url: str, request: pytest.FixtureRequest
) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async with async_sessions_of(url, request.param) as made:
        yield made


def effects(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM effect ORDER BY what")]


def consumer_of(sessions: Any, *messages: Message, **changes: Any) -> Consumer:
    settings: dict[str, Any] = {"name": "billing", "retry": NEVER, "max_idle": SECOND}
    return Consumer(MemorySource(*messages), sessions, **(settings | changes))


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("uses_it_again", [False, True])
async def test_after_a_takeover_the_late_process_commits_nothing(
    url: str,
    sessions: async_sessionmaker[AsyncSession],
    batch: int | None,
    uses_it_again: bool,
) -> None:
    message = Message("orders", b"1")
    begun, thawed = asyncio.Event(), asyncio.Event()
    late, taker = (consumer_of(sessions, message) for _ in range(2))

    @handles(late, "orders", batch=batch)
    async def stall(session: AsyncSession, _: Any) -> None:
        await session.execute(EFFECT, {"what": "late"})
        begun.set()
        await thawed.wait()
        if uses_it_again:
            await session.execute(EFFECT, {"what": "later"})

    @taker.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(EFFECT, {"what": "taken over"})

    async with running(late) as of_late:
        await begun.wait()
        async with running(taker) as of_taker:
            await of_taker.wait_for(MessageHandled)
        thawed.set()
        await of_late.wait_for(DuplicateSkipped)

    assert effects(url) == ["taken over"]
    assert len(of_late.of(HandlerDatabaseLost)) == 1
    assert of_late.of(HandlerFailed) == []


async def test_a_session_terminated_while_its_connection_is_open_is_a_lost_one(
    url: str, proxy: MakeProxy
) -> None:
    server, through = proxy(url)
    async with async_sessions_of(through, "asyncpg") as made:
        consumer = consumer_of(made, Message("orders", b"1"))
        starts = 0

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None:
            nonlocal starts
            starts += 1
            await session.execute(EFFECT, {"what": f"start {starts}"})
            if starts == 1:
                server.hold_close()
                await asyncio.to_thread(
                    wait_for, "it is ended", lambda: execute(url, IDLE) == [(0,)]
                )
                try:
                    await session.execute(EFFECT, {"what": "later"})
                finally:
                    server.forward_close()

        async with running(consumer) as events:
            await events.wait_for(MessageHandled)

    assert effects(url) == ["start 2"]
    assert len(events.of(HandlerDatabaseLost)) == 1
    assert events.of(HandlerFailed) == []


async def test_a_statement_can_take_longer_than_the_idle_limit(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message("orders", b"1"))

    @consumer.handles("orders")
    async def handle(session: AsyncSession, message: Message) -> None:
        await session.execute(text("SELECT pg_sleep(2)"))
        await session.execute(EFFECT, {"what": "done"})

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert events.of(HandlerDatabaseLost) == []
    assert effects(url) == ["done"]


async def note(session: AsyncSession, _: Message | Sequence[Message]) -> None:
    await session.execute(EFFECT, {"what": await session.scalar(LIMIT)})


def note_in_thread(session: Session, _: Message | Sequence[Message]) -> None:
    session.execute(EFFECT, {"what": session.scalar(LIMIT)})


@pytest.mark.parametrize(
    ("max_idle", "said"), [(timedelta(seconds=90), "90s"), (None, "5s")]
)
@pytest.mark.parametrize(
    ("handler", "batch"),
    [(note, None), (note, 2), (idempotent(consumer="billing")(note), None)],
    ids=["one", "batch", "idempotent"],
)
async def test_the_idle_limit_applies_to_every_kind_of_handler(
    url: str,
    sessions: async_sessionmaker[AsyncSession],
    handler: Any,
    batch: int | None,
    max_idle: timedelta | None,
    said: str,
) -> None:
    execute(
        url,
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET "
        "idle_in_transaction_session_timeout = ''5s''', current_database()); END $$",
    )
    consumer = consumer_of(sessions, *numbered(1), max_idle=max_idle)
    handles(consumer, "orders", batch=batch)(handler)
    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert effects(url) == [said]

    async with sessions() as session:
        assert await session.scalar(LIMIT) == "5s"


@pytest.mark.parametrize("batch", [None, 2])
async def test_the_idle_limit_applies_to_functions_in_threads(
    url: str, batch: int | None
) -> None:
    with sessions_of(url) as made:
        consumer = consumer_of(made, *numbered(1))
        handles(consumer, "orders", batch=batch)(note_in_thread)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
    assert effects(url) == ["1s"]


async def test_the_idle_limit_applies_to_the_retry_of_a_dead_letter(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    give_up(url, *numbered(1), schema="inbox")
    consumer = consumer_of(sessions)
    consumer.handles("orders")(note)
    await retry(consumer.retrier())
    assert effects(url) == ["1s"]


async def test_a_job_idle_in_a_transaction_is_restarted(
    url: str, sessions: async_sessionmaker[AsyncSession]
) -> None:
    consumer = consumer_of(sessions, Message("orders", b"1"))
    begun: list[int] = []

    @consumer.job("orders", lease=LEASE)
    async def handle(job: AsyncJob, message: Message) -> None:
        begun.append(job.attempts)
        async with job.transaction() as session:
            await session.execute(EFFECT, {"what": f"start {len(begun)}"})
            if len(begun) == 1:
                await asyncio.to_thread(
                    wait_for, "it is ended", lambda: execute(url, IDLE) == [(0,)]
                )

    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
    assert begun == [1, 1]
    assert effects(url) == ["start 2"]
    assert events.of(HandlerFailed) == []


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
    others = ("make_days()", "inbox.beat(")  # with one statement each
    inbox, rights, *first = (s for s in started if not any(it in s for it in others))
    assert inbox.startswith("SELECT 1 FROM inbox.receipt")
    assert "has_table_privilege" in rights
    assert len(first) > 2
    assert all(statement.startswith("SELECT set_config") for statement in first)
    assert effects(url) == noted


async def test_dead_lettering_sets_its_timeout_before_it_takes_the_lock(
    url: str,
) -> None:
    seen: list[str] = []
    with sessions_of(url) as made:
        event.listen(
            made.kw["bind"],
            "before_cursor_execute",
            lambda *arguments: seen.append(arguments[2]),
        )
        consumer = consumer_of(made, Message("unknown", b"1"))
        consumer.handles("orders")(note_in_thread)
        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered)

    ((before, _),) = [two for two in pairwise(seen) if "advisory" in two[1]]
    assert before.startswith("SELECT set_config")
