"""A handler can't end its transaction, and lost work never counts as handled.

The tests try the ways of `tests.fixtures.endings` through each entry point and with
each driver, and count effects, receipts and dead letters. The variants try every
combination of entry point, way and driver.
"""

import asyncio
import re
from collections.abc import (
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IllegalStateChangeError, PendingRollbackError
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session
from sqlalchemy.orm import Session

from pillarbox import (
    Consumer,
    DeadLetter,
    Message,
    guard,
    idempotent,
    uuid7,
)
from pillarbox.inbox.errors import (
    HandlerTransactionError,
    TransactionEndedError,
)
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.events import Event
from tests.fixtures.consumers import (
    DRIVERS,
    QUICK,
    async_sessions_of,
    consuming,
    handles,
    is_plain,
    running,
    sessions_by,
)
from tests.fixtures.dead_letters import retry
from tests.fixtures.endings import (
    EFFECT,
    RIGHT_WAYS,
    WAYS,
    Effect,
    Way,
    catch_an_error,
    dead_letters,
    effects,
    execute_by_cursor,
    forget,
    receipts,
    reset_all_settings,
    roll_back_and_go_on,
    roll_back_and_hide_the_refusals,
)
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn
from tests.fixtures.webhook import hook_app, served, status_of

Do = Callable[[Session], object]
T = TypeVar("T")

DONE: Final = {"what": "done"}


@dataclass(frozen=True)
class Result:
    """The result of one message: the error its caller saw, or how it was settled."""

    raised: Exception | None = None
    is_dead: bool = False


def handler_of(driver: str, do: Do) -> Any:
    """Return a handler that writes an effect, and then calls `do`."""

    def handle(session: Session, message: Any) -> None:
        session.execute(EFFECT, DONE)
        do(session)

    async def handle_async(session: AsyncSession, message: Any) -> None:
        await session.run_sync(handle, message)

    return handle if is_plain(driver) else handle_async


async def settle(consumer: Consumer) -> Result:
    settled = asyncio.Event()
    dead: list[bool] = []

    def note(event: Event) -> None:
        if isinstance(event, MessageHandled | DuplicateSkipped | MessageDeadLettered):
            dead.append(isinstance(event, MessageDeadLettered))
            settled.set()

    consumer.observe(note)
    async with running(consumer):
        await settled.wait()
    (is_dead,) = dead
    return Result(is_dead=is_dead)


def consumer_of(sessions: Any, message: Message, **settings: Any) -> Consumer:
    return Consumer(
        MemorySource(message), sessions, name="billing", retry=QUICK, **settings
    )


async def by_consumer(
    sessions: Any, driver: str, message: Message, do: Do, **terms: Any
) -> Result:
    consumer = consumer_of(sessions, message)
    handles(consumer, "*", **terms)(handler_of(driver, do))
    return await settle(consumer)


async def by_batch(sessions: Any, driver: str, message: Message, do: Do) -> Result:
    return await by_consumer(sessions, driver, message, do, batch=2)


async def by_idempotent(sessions: Any, driver: str, message: Message, do: Do) -> Result:
    handler: Any = idempotent(consumer="billing")(handler_of(driver, do))
    try:
        if is_plain(driver):
            with sessions.begin() as session:
                handler(session, message)
        else:
            async with sessions.begin() as session:
                await handler(session, message)
    except Exception as error:  # noqa: BLE001 (the test checks which error it is)
        return Result(error)
    return Result()


async def by_guard(sessions: Any, driver: str, message: Message, do: Do) -> Result:
    handler = handler_of(driver, do)
    try:
        if is_plain(driver):
            with (
                sessions.begin() as session,
                guard(session, message.id, consumer="billing"),
            ):
                handler(session, message)
        else:
            async with (
                sessions.begin() as session,
                guard(session, message.id, consumer="billing"),
            ):
                await handler(session, message)
    except Exception as error:  # noqa: BLE001 (the test checks which error it is)
        return Result(error)
    return Result()


ENTRIES: Final = {
    "consumer": by_consumer,
    "batch": by_batch,
    "idempotent": by_idempotent,
    "guard": by_guard,
}


@pytest.fixture
def url(database: str) -> Iterator[str]:
    """Yield the database that these tests share; empty its tables after each test."""
    yield database
    forget(database)


EVERYDAY: Final = {
    *("caught error", "caught error in the commit's flush"),
    *("commit", "rollback", "close"),
    *("COMMIT by a cursor, then an error", "commit and close by the driver"),
}
"""The ways that are everyday mistakes, which are tried with every driver."""

ENTRY_NAMES: Final = [*ENTRIES, "webhook", "transaction", "finish"]


class Share:
    """Selects the part of a list to try with one driver."""

    def __init__(self, *, is_whole: bool) -> None:
        self._is_whole = is_whole

    def of(self, things: Iterable[T], driver: str, entry: str, parts: int) -> list[T]:
        """Return one of several parts of the list, another one with each entry."""
        ours = 2 * DRIVERS.index(driver) + ENTRY_NAMES.index(entry)
        return [
            thing
            for n, thing in enumerate(things)
            if self._is_whole or n % parts == ours % parts
        ]

    def of_ways(self, driver: str, entry: str) -> list[tuple[str, Way]]:
        """Return every eighth way; in a consumer, also all everyday ways.

        Together, the eight entries cover all ways with each driver.
        """
        ours = self.of(WAYS, driver, entry, len(ENTRY_NAMES))
        everyday = sorted(EVERYDAY - {*ours}) if entry == "consumer" else []
        return [(name, WAYS[name]) for name in (*everyday, *ours)]


@pytest.fixture(params=["part", pytest.param("whole", marks=pytest.mark.variant)])
def share(request: pytest.FixtureRequest) -> Share:
    return Share(is_whole=request.param == "whole")


@pytest.mark.filterwarnings(
    "ignore:transaction already deassociated:sqlalchemy.exc.SAWarning"
)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("driver", DRIVERS)
async def test_ending_or_breaking_the_transaction_is_a_failed_attempt(
    driver: str, entry: str, url: str, share: Share
) -> None:
    ways = share.of_ways(driver, entry)
    async with sessions_by(url, driver) as sessions:
        for name, way in ways:
            message = Message("orders", name.encode())
            seen = await ENTRIES[entry](sessions, driver, message, way.do)
            check(name, way, seen, url)
            forget(url)


def check(name: str, way: Way, seen: Result, url: str, *, of_job: bool = False) -> None:
    kept = ["done"] if way.is_committed else []
    is_final = way.is_committed or (of_job and way.raises is TransactionEndedError)
    said = [f"{type(seen.raised).__name__}: {seen.raised}"]
    if seen.raised is None:
        assert seen.is_dead, name
        ((reason, attempts),) = dead_letters(url)
        said = [reason]
        # Committed work isn't retried, because it would be skipped as a duplicate.
        assert attempts == (1 if is_final else QUICK.max_attempts), name
    (problem,) = said
    assert re.match(rf"{way.raises.__name__}: .*{way.says}", problem), (name, problem)
    # Of a long handler's transactions, only the last writes a receipt.
    known = 0 if of_job else len(kept)
    assert (name, effects(url), receipts(url)) == (name, kept, known)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_handler_can_use_savepoints(
    driver: str, entry: str, url: str, share: Share
) -> None:
    ways = share.of(RIGHT_WAYS, driver, entry, 4)
    async with sessions_by(url, driver) as sessions:
        for do in ways:
            message = Message("orders", b"1")
            seen = await ENTRIES[entry](sessions, driver, message, do)
            assert (do, seen) == (do, Result())
            assert (do, effects(url), receipts(url)) == (do, ["done", "more"], 1)
            assert dead_letters(url) == []
            forget(url)


@pytest.mark.parametrize(("driver", "entry"), in_turn(DRIVERS, ENTRIES))
async def test_a_handler_that_resets_settings_has_not_ended_its_transaction(
    driver: str, entry: str, url: str
) -> None:
    async with sessions_by(url, driver) as sessions:
        message = Message("orders", b"1")
        seen = await ENTRIES[entry](sessions, driver, message, reset_all_settings)
    assert seen == Result()
    assert (effects(url), receipts(url)) == (["done", "more"], 1)
    assert dead_letters(url) == []


async def use(sessions: Any, driver: str, do: Do) -> None:
    """Call `do` with a session, which it may commit itself."""
    if is_plain(driver):
        with sessions() as session:
            do(session)
        return
    async with sessions() as session:
        await session.run_sync(do)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_an_error_caught_after_the_block_makes_the_callers_commit_fail(
    driver: str, url: str
) -> None:
    def handle(session: Session) -> None:
        with guard(session, uuid7(), consumer="billing"):
            session.execute(EFFECT, DONE)
        catch_an_error(session)
        with pytest.raises(HandlerTransactionError, match="SQLSTATE 23505"):
            session.commit()
        # A second attempt also raises, and loses nothing silently.
        with pytest.raises(PendingRollbackError):
            session.commit()

    async with sessions_by(url, driver) as sessions:
        await use(sessions, driver, handle)
    assert (effects(url), receipts(url)) == ([], 0)


@asynccontextmanager
async def connection_of(sessions: Any, driver: str) -> AsyncIterator[Any]:
    """Yield a connection in a transaction, which commits at the end of the block."""
    if is_plain(driver):
        with sessions.kw["bind"].begin() as connection:
            yield connection
        return
    async with sessions.kw["bind"].begin() as connection:
        yield connection


async def handle_once(
    connection: Any, driver: str, do: Do, *, after: Do = lambda _: None
) -> None:
    """Call `do` in a guard of a session that works in a connection's transaction."""
    if is_plain(driver):
        session = Session(connection)
        with guard(session, uuid7(), consumer="billing"):
            do(session)
        after(session)
        return
    async_session = AsyncSession(connection)
    async with guard(async_session, uuid7(), consumer="billing"):
        await async_session.run_sync(do)
    await async_session.run_sync(after)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_an_error_caught_after_the_block_makes_the_connections_commit_fail(
    driver: str, url: str
) -> None:
    def do(session: Session) -> None:
        session.execute(EFFECT, DONE)

    async with sessions_by(url, driver) as sessions:
        with pytest.raises(HandlerTransactionError, match="SQLSTATE 23505"):
            async with connection_of(sessions, driver) as connection:
                await handle_once(connection, driver, do, after=catch_an_error)
    assert (effects(url), receipts(url)) == ([], 0)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_session_in_a_connections_transaction_is_flushed_with_the_receipt(
    driver: str, url: str
) -> None:
    async with (
        sessions_by(url, driver) as sessions,
        connection_of(sessions, driver) as connection,
    ):
        await handle_once(connection, driver, lambda s: s.add(Effect("done")))
    assert (effects(url), receipts(url)) == (["done"], 1)


async def transact(sessions: Any, driver: str, do: Do) -> None:
    if is_plain(driver):
        with sessions.begin() as session:
            do(session)
        return
    async with sessions.begin() as session:
        await session.run_sync(do)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_transaction_ended_after_the_block_is_not_committed(
    driver: str, url: str
) -> None:
    def handle(session: Session) -> None:
        with guard(session, uuid7(), consumer="billing"):
            session.execute(EFFECT, {"what": "lost"})
        WAYS["ROLLBACK by a cursor, then a transaction"].do(session)

    async with sessions_by(url, driver) as sessions:
        with pytest.raises(TransactionEndedError):
            await transact(sessions, driver, handle)
    assert (effects(url), receipts(url)) == ([], 0)


ROLLBACKS: Final = [
    pytest.param(do, id=do.__name__)
    for do in (roll_back_and_go_on, roll_back_and_hide_the_refusals)
]


@pytest.mark.parametrize(("driver", "do"), in_turn(DRIVERS, ROLLBACKS))
async def test_a_guards_block_that_rolled_back_cannot_go_on_in_a_new_transaction(
    driver: str, do: Do, url: str
) -> None:
    def handle(session: Session) -> None:
        with guard(session, uuid7(), consumer="billing"):
            do(session)

    async with sessions_by(url, driver) as sessions:
        with pytest.raises(HandlerTransactionError, match=r"\(\): refused"):
            await use(sessions, driver, handle)
    assert (effects(url), receipts(url)) == ([], 0)


async def test_a_two_phase_commit_is_checked_before_it_is_prepared(url: str) -> None:
    def handle(session: Session) -> None:
        with guard(session, uuid7(), consumer="billing"):
            session.execute(EFFECT, DONE)
        catch_an_error(session)

    async with sessions_by(url, "psycopg") as sessions:
        sessions.configure(twophase=True)
        # SQLAlchemy 2.0.31 can't roll back after an error in PREPARE, and raises that.
        with pytest.raises((HandlerTransactionError, IllegalStateChangeError)):
            await transact(sessions, "psycopg", handle)
    assert (effects(url), receipts(url)) == ([], 0)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_the_caller_can_end_the_transaction_again_after_the_block(
    driver: str, url: str
) -> None:
    def handle(session: Session) -> None:
        for _ in range(2):
            with guard(session, uuid7(), consumer="billing"):
                pass
            session.rollback()
            with guard(session, uuid7(), consumer="billing"):
                pass
            session.connection().commit()
            session.close()

    async with sessions_by(url, driver) as sessions:
        await use(sessions, driver, handle)
    assert receipts(url) == 2


async def by_webhook(sessions: Any, driver: str, message: Message, do: Do) -> Result:
    app = hook_app(handler_of(driver, do), sessions)
    async with served(app) as hook:
        statuses = [await status_of(hook, message) for _ in range(2)]
    assert statuses in ([204, 204], [500, 500])
    return Result(is_dead=statuses == [204, 204])


@pytest.mark.filterwarnings(
    "ignore:transaction already deassociated:sqlalchemy.exc.SAWarning"
)
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_webhook_asks_for_redelivery_if_the_commit_fails(
    driver: str, url: str, share: Share
) -> None:
    async with sessions_by(url, driver) as sessions:
        for name, way in share.of_ways(driver, "webhook"):
            seen = await by_webhook(sessions, driver, Message("orders", b"1"), way.do)
            kept = ["done"] if way.is_committed else []
            assert (name, effects(url), receipts(url)) == (name, kept, len(kept))
            assert (name, seen.is_dead, len(dead_letters(url))) == (
                name,
                way.is_committed,
                len(kept),
            )
            forget(url)


LOSSES: Final = ["noticed", "not noticed"]


@pytest.mark.parametrize(("driver", "loss"), in_turn(DRIVERS, LOSSES))
async def test_a_connection_lost_before_an_error_is_not_ended_by_the_handler(
    driver: str, loss: str, url: str
) -> None:
    calls: list[int] = []

    def lose_the_first(session: Session) -> None:
        pid = session.scalar(text("SELECT pg_backend_pid()"))
        calls.append(pid)
        if len(calls) > 1:
            return
        execute(url, f"SELECT pg_terminate_backend({pid}, 5000)")
        if loss == "noticed":
            with suppress(Exception):  # each driver has its own
                execute_by_cursor(session, "SELECT 1")
        raise ValueError("not done")

    source = MemorySource(Message("orders", b"1"))
    handler = handler_of(driver, lose_the_first)
    async with consuming(url, source, handler, driver=driver, retry=QUICK) as events:
        await events.wait_for(MessageHandled)
    failures = [event.reason for event in events.of(HandlerFailed)]
    assert not any("TransactionEndedError" in reason for reason in failures)
    assert (effects(url), receipts(url), len(calls)) == (["done"], 1, 2)


async def by_job(
    sessions: Any, driver: str, message: Message, do: Do, *, finish: bool
) -> Result:
    consumer = consumer_of(sessions, message)

    def handle(job: Job, message: Message) -> None:
        with job.finish() if finish else job.transaction() as session:
            session.execute(EFFECT, DONE)
            do(session)

    async def handle_async(job: AsyncJob, message: Message) -> None:
        async with job.finish() if finish else job.transaction() as session:
            await session.execute(EFFECT, DONE)
            await session.run_sync(do)

    handler = handle if is_plain(driver) else handle_async
    consumer.job("*", lease=timedelta(seconds=60))(handler)
    return await settle(consumer)


@pytest.mark.filterwarnings(
    "ignore:transaction already deassociated:sqlalchemy.exc.SAWarning"
)
@pytest.mark.parametrize("block", ["transaction", "finish"])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_long_handler_cannot_end_its_transactions_either(
    driver: str, block: str, url: str, share: Share
) -> None:
    finish = block == "finish"
    async with sessions_by(url, driver) as sessions:
        for name, way in share.of_ways(driver, block):
            message = Message("orders", b"1")
            seen = await by_job(sessions, driver, message, way.do, finish=finish)
            check(name, way, seen, url, of_job=True)
            forget(url)
        for do in share.of(RIGHT_WAYS, driver, block, 4):
            message = Message("orders", b"1")
            seen = await by_job(sessions, driver, message, do, finish=finish)
            assert (do, seen) == (do, Result())
            assert (do, effects(url), receipts(url)) == (do, ["done", "more"], 1)
            forget(url)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_long_handler_that_resets_settings_has_not_ended_a_transaction(
    driver: str, url: str
) -> None:
    async with sessions_by(url, driver) as sessions:
        for finish in (True, False):
            message = Message("orders", b"1")
            do = reset_all_settings
            seen = await by_job(sessions, driver, message, do, finish=finish)
            assert seen == Result()
            assert (effects(url), receipts(url)) == (["done", "more"], 1)
            forget(url)


@pytest.mark.parametrize(
    ("driver", "then", "ending", "max_idle"),
    in_turn(
        DRIVERS,
        ["return", "transaction", "finish"],
        [["COMMIT"], ["COMMIT", "BEGIN"]],
        [timedelta(seconds=60), None],
    ),
)
async def test_a_long_handler_cannot_hide_that_a_transaction_was_ended(
    driver: str, max_idle: timedelta | None, ending: list[str], then: str, url: str
) -> None:
    message = Message("orders", b"1")

    def end(session: Session) -> None:
        session.execute(EFFECT, DONE)
        execute_by_cursor(session, *ending)

    def handle(job: Job, message: Message) -> None:
        with suppress(TransactionEndedError), job.transaction() as session:
            end(session)
        if then == "return":
            return
        block = job.finish() if then == "finish" else job.transaction()
        with suppress(TransactionEndedError), block as session:
            session.execute(EFFECT, {"what": "more"})

    async def handle_async(job: AsyncJob, message: Message) -> None:
        with suppress(TransactionEndedError):
            async with job.transaction() as session:
                await session.run_sync(end)
        if then == "return":
            return
        with suppress(TransactionEndedError):
            block = job.finish() if then == "finish" else job.transaction()
            async with block as session:
                await session.execute(EFFECT, {"what": "more"})

    async with sessions_by(url, driver) as sessions:
        consumer = consumer_of(sessions, message, max_idle=max_idle)
        handler: Any = handle if is_plain(driver) else handle_async
        consumer.job("*", lease=timedelta(seconds=60))(handler)
        assert await settle(consumer) == Result(is_dead=True)
    ((reason, attempts),) = dead_letters(url)
    assert (reason.partition(":")[0], attempts) == ("TransactionEndedError", 1)
    assert (effects(url), receipts(url)) == (["done"], 0)


async def test_a_batch_loses_only_the_message_whose_error_was_caught(url: str) -> None:
    messages = [Message("orders", str(n).encode(), key=str(n)) for n in range(5)]

    async def handle(session: AsyncSession, batch: Sequence[Message]) -> None:
        for message in batch:
            what = message.payload.decode()
            await session.execute(EFFECT, {"what": what})
            if what == "3":
                await session.run_sync(catch_an_error)

    source, terms = MemorySource(*messages), {"batch": 5}
    async with consuming(url, source, handle, terms, retry=QUICK) as events:
        await events.wait_for(MessageHandled, 4)
        await events.wait_for(MessageDeadLettered)
    assert effects(url) == ["0", "1", "2", "4"]
    assert receipts(url) == 4
    ((reason, _),) = dead_letters(url)
    assert "the handler caught a database error (IntegrityError" in reason


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_retry_fails_if_the_handler_breaks_its_transaction(
    driver: str, url: str
) -> None:
    message = Message("orders", b"1")

    def fail(session: Session) -> None:
        raise DeadLetter("broken")

    async with sessions_by(url, driver) as sessions:
        assert (await by_consumer(sessions, driver, message, fail)).is_dead
        for name in ("caught error", "commit", "caught refusal", "close"):
            way = WAYS[name]
            consumer = consumer_of(sessions, message)
            consumer.handles("*")(handler_of(driver, way.do))
            tally = await retry(consumer.retrier())
            assert (name, tally["failed"], tally["succeeded"]) == (name, 1, 0)
            ((reason, _),) = dead_letters(url)
            assert reason.startswith(way.raises.__name__)
    assert (effects(url), receipts(url)) == ([], 0)


async def test_the_session_of_an_async_scoped_session_is_protected(url: str) -> None:
    async with async_sessions_of(url, "asyncpg") as sessions:
        scoped = async_scoped_session(sessions, scopefunc=asyncio.current_task)
        with pytest.raises(HandlerTransactionError):
            async with scoped.begin(), guard(scoped, uuid7(), consumer="billing"):
                await scoped().run_sync(catch_an_error)
        with pytest.raises(HandlerTransactionError, match=r"rollback\(\) or close\("):
            async with scoped.begin(), guard(scoped, uuid7(), consumer="billing"):
                await scoped.remove()
        await scoped.remove()
    assert receipts(url) == 0
