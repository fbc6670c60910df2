"""Handlers on the connections of a psycopg pool have the guarantees of sessions.

Each test runs a plain function with a `ConnectionPool` and a coroutine function with an
`AsyncConnectionPool`. What a handler does is written once, as a generator of calls:
those of an async connection are awaited.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import psycopg
import pytest
from psycopg.rows import dict_row
from psycopg.types.string import TextLoader
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import (
    AsyncJob,
    ConfigError,
    Consumer,
    DeadLetter,
    Job,
    Message,
    add,
)
from pillarbox.inbox.errors import HandlerTransactionError, TransactionEndedError
from pillarbox.inbox.events import (
    DuplicateSkipped,
    HandlerDatabaseLost,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.testing.events import RecordedEvents
from tests.fixtures.consumers import (
    POOLS,
    QUICK,
    async_sessions_of,
    consuming,
    handles,
    is_plain,
    pool_of,
    running,
    sessions_of,
)
from tests.fixtures.dead_letters import give_up, retry, states
from tests.fixtures.endings import (
    dead_letters,
    effects,
    forget,
    receipts,
)
from tests.fixtures.sessions import execute

EFFECT: Final = "INSERT INTO effect (what) VALUES (%s)"
COLLISION: Final = "INSERT INTO effect (what) VALUES ('there')"

Steps = Callable[[Any], Generator[Any, Any, None]]

both = pytest.mark.parametrize("kind", POOLS)


@pytest.fixture
def url(database: str) -> Iterator[str]:
    """Yield the database that these tests share; empty its tables after each test."""
    yield database
    forget(database)
    execute(database, "DELETE FROM outbox.message")


def handler_of(kind: str, steps: Steps) -> Any:
    """Return a handler that inserts an effect, and then does the steps."""

    def plain(connection: Any, _: Any) -> None:
        connection.execute(EFFECT, ["done"])
        for _ in steps(connection):
            pass

    async def coroutine(connection: Any, _: Any) -> None:
        await connection.execute(EFFECT, ["done"])
        doing = steps(connection)
        with suppress(StopIteration):
            step = next(doing)
            while True:
                try:
                    value = await step
                except Exception as error:  # noqa: BLE001 (it is the step's to catch)
                    step = doing.throw(error)
                else:
                    step = doing.send(value)

    return plain if is_plain(kind) else coroutine


def nothing(connection: Any) -> Generator[Any, Any, None]:
    yield from ()


def consumer_of(pool: Any, *messages: Message, **settings: Any) -> Consumer:
    given = {"name": "billing", "retry": QUICK, **settings}
    return Consumer(MemorySource(*messages), pool, **given)


def handling(
    kind: str, url: str, handler: Callable[..., Any], **settings: Any
) -> AbstractAsyncContextManager[RecordedEvents]:
    """Run a consumer with this handler and one message for the block."""
    source = MemorySource(Message("orders", b"1"))
    return consuming(url, source, handler, driver=kind, retry=QUICK, **settings)


async def failure_of(kind: str, url: str, handler: Callable[..., Any]) -> Any:
    """Return why a message became a dead letter, and after how many attempts."""
    async with handling(kind, url, handler) as events:
        await events.wait_for(MessageDeadLettered)
    (found,) = dead_letters(url)
    return found


@both
@pytest.mark.parametrize("autocommit", [False, True])
async def test_receipt_and_effects_commit_together(
    kind: str, autocommit: bool, url: str
) -> None:
    message = Message("orders", b"1")
    options: Any = {"autocommit": autocommit, "row_factory": dict_row}
    async with pool_of(kind, url, **options) as pool:
        consumer = consumer_of(pool, message, message)
        consumer.handles("orders")(handler_of(kind, nothing))
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            await events.wait_for(DuplicateSkipped)
    assert (effects(url), receipts(url)) == (["done"], 1)


@both
async def test_a_batch_has_one_transaction(kind: str, url: str) -> None:
    messages = [Message("orders", str(n).encode()) for n in range(5)]
    sizes: list[int] = []

    def count(connection: Any, batch: Sequence[Message]) -> Any:
        sizes.append(len(batch))
        return connection.execute(
            "INSERT INTO effect (what) SELECT unnest(%s::text[])",
            [[message.payload.decode() for message in batch]],
        )

    def plain(connection: Any, batch: Sequence[Message]) -> None:
        count(connection, batch)

    async def coroutine(connection: Any, batch: Sequence[Message]) -> None:
        await count(connection, batch)

    async with pool_of(kind, url) as pool:
        consumer = consumer_of(pool, *messages)
        handler = plain if is_plain(kind) else coroutine
        consumer.handles_batch("orders", max_size=10)(handler)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled, count=5)
    assert (effects(url), receipts(url)) == (list("01234"), 5)
    assert max(sizes) > 1


@both
async def test_a_handler_that_raises_leaves_nothing(kind: str, url: str) -> None:
    # Its class alone doesn't make it an outage of the handlers' database.
    fail = executes(error=psycopg.OperationalError("another server is away"))
    failure = await failure_of(kind, url, handler_of(kind, fail))
    assert failure == ("OperationalError: another server is away", 3)
    assert (effects(url), receipts(url)) == ([], 0)


@dataclass(frozen=True)
class Way:
    """One thing that a handler does with its connection."""

    steps: Steps
    raises: type[Exception]
    says: str
    is_committed: bool = False


def catch_an_error(connection: Any) -> Generator[Any, Any, None]:
    with suppress(psycopg.Error):
        yield connection.execute(COLLISION)


def calls(name: str) -> Steps:
    def steps(connection: Any) -> Generator[Any, Any, None]:
        yield getattr(connection, name)()

    return steps


LOST: Final = "INSERT INTO effect (what) VALUES ('lost')"


def executes(*statements: str, error: Exception | None = None) -> Steps:
    def steps(connection: Any) -> Generator[Any, Any, None]:
        for statement in statements:
            yield connection.execute(statement)
        if error is not None:
            raise error

    return steps


def ending(steps: Steps) -> Way:
    return Way(steps, TransactionEndedError, "COMMIT", is_committed=True)


WAYS: Final = {
    "caught error": Way(
        catch_an_error, HandlerTransactionError, "nothing was committed"
    ),
    "commit()": Way(calls("commit"), psycopg.ProgrammingError, "Explicit commit"),
    "rollback()": Way(calls("rollback"), psycopg.ProgrammingError, "Explicit rollback"),
    "close()": Way(calls("close"), HandlerTransactionError, "close(): refused"),
    "Rollback": Way(
        executes(error=psycopg.Rollback()), HandlerTransactionError, "Rollback: refused"
    ),
    "COMMIT": ending(executes("COMMIT")),
    "COMMIT and on": ending(executes("COMMIT", LOST)),
    "COMMIT, then an error": ending(
        executes("COMMIT", error=ValueError("after the commit"))
    ),
    "ROLLBACK and on": Way(
        executes("ROLLBACK", LOST), TransactionEndedError, "COMMIT or ROLLBACK"
    ),
}


@both
@pytest.mark.parametrize("name", WAYS)
async def test_ending_or_breaking_the_transaction_is_a_failed_attempt(
    kind: str, name: str, url: str
) -> None:
    way = WAYS[name]
    reason, attempts = await failure_of(kind, url, handler_of(kind, way.steps))
    assert reason.startswith(f"{way.raises.__name__}: {way.says}")
    # Committed work isn't retried, because it would be skipped as a duplicate.
    assert attempts == (1 if way.is_committed else QUICK.max_attempts)
    kept = ["done"] if way.is_committed else []
    assert (effects(url), receipts(url)) == (kept, len(kept))


@both
async def test_a_savepoint_keeps_the_rest_of_the_work(kind: str, url: str) -> None:
    def recover(connection: Any) -> Generator[Any, Any, None]:
        yield connection.execute("SAVEPOINT attempt")
        with suppress(psycopg.errors.UniqueViolation):
            yield connection.execute(COLLISION)
        yield connection.execute("ROLLBACK TO attempt")
        yield connection.execute(EFFECT, ["more"])

    async with handling(kind, url, handler_of(kind, recover)) as events:
        await events.wait_for(MessageHandled)
    assert (effects(url), receipts(url)) == (["done", "more"], 1)


@both
async def test_a_reset_of_all_settings_does_not_end_the_transaction(
    kind: str, url: str
) -> None:
    handler = handler_of(kind, executes("RESET ALL"))
    async with handling(kind, url, handler) as events:
        await events.wait_for(MessageHandled)
    assert (effects(url), receipts(url)) == (["done"], 1)


@both
async def test_a_connection_that_breaks_costs_no_attempt(kind: str, url: str) -> None:
    calls: list[object] = []

    def terminate_once(connection: Any) -> Generator[Any, Any, None]:
        calls.append(connection)
        if len(calls) == 1:
            yield connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    def terminate_and_hide_it_once(connection: Any) -> Generator[Any, Any, None]:
        with suppress(psycopg.Error):
            yield from terminate_once(connection)

    for steps in (terminate_once, terminate_and_hide_it_once):
        calls.clear()
        async with handling(kind, url, handler_of(kind, steps)) as events:
            await events.wait_for(MessageHandled)
        assert events.of(HandlerFailed) == []
        assert (len(calls), effects(url), receipts(url)) == (2, ["done"], 1)
        forget(url)


async def test_a_handler_that_is_idle_for_too_long_loses_its_transaction(
    url: str,
) -> None:
    calls: list[object] = []

    async def stall_once(connection: psycopg.AsyncConnection, _: Message) -> None:
        calls.append(connection)
        await connection.execute(EFFECT, ["done"])
        if len(calls) == 1:
            # Until the server ends the session.
            async for _notification in connection.notifies():
                pass

    second = timedelta(seconds=1)
    async with handling("async pool", url, stall_once, max_idle=second) as events:
        await events.wait_for(MessageHandled)
    assert (len(calls), effects(url), receipts(url)) == (2, ["done"], 1)


@both
async def test_messages_added_on_the_connection_name_their_cause(
    kind: str, url: str
) -> None:
    def bill(connection: Any) -> Generator[Any, Any, None]:
        adding = add(connection, Message("bills", b"1"))
        if adding is not None:
            yield adding

    async with handling(kind, url, handler_of(kind, bill)) as events:
        (handled,) = await events.wait_for(MessageHandled)
    added = execute(url, "SELECT headers ->> 'causation-id' FROM outbox.message")
    assert added == [(str(handled.id),)]


@both
@pytest.mark.parametrize("is_batch", [False, True])
async def test_a_dead_letter_is_retried_in_the_transaction_of_its_handler(
    kind: str, is_batch: bool, url: str
) -> None:
    problems = ["no such order"]

    def fail_once(connection: Any) -> Generator[Any, Any, None]:
        yield from ()
        if problems:
            raise DeadLetter(problems.pop())

    give_up(url, Message("orders", b"1"), schema="inbox")
    for counts in (Counter(failed=1), Counter(succeeded=1)):
        make: Any = ConnectionPool if is_plain(kind) else AsyncConnectionPool
        pool = make(url, open=False, kwargs={"row_factory": dict_row})
        consumer = consumer_of(pool)
        handler = handler_of(kind, fail_once)
        handles(consumer, "orders", batch=2 if is_batch else None)(handler)
        assert await retry(consumer.retrier()) == counts
        assert pool.closed
        assert len(effects(url)) == receipts(url) == counts["succeeded"]
    assert states(url, "inbox") == [("SUCCEEDED", 1, "DeadLetter: no such order")]


@both
async def test_a_handler_that_commits_leaves_its_dead_letter_as_it_was(
    kind: str, url: str
) -> None:
    give_up(url, Message("orders", b"1"), schema="inbox")
    make: Any = ConnectionPool if is_plain(kind) else AsyncConnectionPool
    consumer = consumer_of(make(url, open=False, kwargs={"autocommit": True}))
    consumer.handles("orders")(handler_of(kind, executes("COMMIT")))

    assert await retry(consumer.retrier()) == Counter(failed=1)

    ((status, _, reason),) = states(url, "inbox")
    assert (status, reason.partition(":")[0]) == ("PENDING", "TransactionEndedError")


def leave_transaction(connection: Any) -> Generator[Any, Any, None]:
    block = connection.transaction()
    KEPT.append(block)
    yield enter(block)


def leave_pipeline(connection: Any) -> Generator[Any, Any, None]:
    block = connection.pipeline()
    KEPT.append(block)
    yield enter(block)


def leave_copy(connection: Any) -> Generator[Any, Any, None]:
    cursor = connection.cursor()
    block = cursor.copy("COPY effect FROM STDIN")
    KEPT.extend([cursor, block])
    yield enter(block)


def enter(block: Any) -> Any:
    aenter = getattr(block, "__aenter__", None)
    return block.__enter__() if aenter is None else aenter()


KEPT: Final[list[Any]] = []
"""What handlers leave open, so that nothing but the consumer closes it."""


@both
@pytest.mark.parametrize("steps", [leave_transaction, leave_pipeline, leave_copy])
async def test_a_block_that_is_left_open_is_a_failed_attempt(
    kind: str, steps: Steps, url: str
) -> None:
    reason, _ = await failure_of(kind, url, handler_of(kind, steps))
    KEPT.clear()
    assert "left a " in reason
    assert (effects(url), receipts(url)) == ([], 0)


@both
@pytest.mark.parametrize("steps", [leave_transaction, leave_pipeline, leave_copy])
async def test_a_block_that_is_left_open_fails_the_retry_of_a_dead_letter(
    kind: str, steps: Steps, url: str
) -> None:
    give_up(url, Message("orders", b"1"), schema="inbox")
    async with pool_of(kind, url) as pool:
        consumer = consumer_of(pool)
        consumer.handles("orders")(handler_of(kind, steps))
        assert await retry(consumer.retrier()) == Counter(failed=1)
    KEPT.clear()
    ((status, _, reason),) = states(url, "inbox")
    assert status == "PENDING"
    assert "left a " in reason


async def test_a_pool_that_is_closed_too_early_is_an_outage(url: str) -> None:
    async with pool_of("async pool", url) as pool:
        source = MemorySource()
        consumer = Consumer(source, pool, name="billing", retry=QUICK)
        consumer.handles("orders")(handler_of("async pool", nothing))
        async with running(consumer) as events:
            await pool.close()
            source.add(Message("orders", b"1"))
            await events.wait_for(HandlerDatabaseLost)
    assert events.of(MessageDeadLettered) == []


async def test_any_settings_of_pools_connections_and_cursors_are_possible(
    url: str,
) -> None:
    async def begin(connection: psycopg.AsyncConnection) -> None:
        await connection.execute("SELECT 1")

    async def read_ids_as_text(connection: psycopg.AsyncConnection) -> None:
        connection.adapters.register_loader("uuid", TextLoader)

    async def handle(connection: psycopg.AsyncConnection, message: Message) -> None:
        await connection.execute("INSERT INTO effect VALUES ($1)", ["done"])

    async with AsyncConnectionPool(
        url,
        kwargs={"cursor_factory": psycopg.AsyncRawCursor},
        configure=read_ids_as_text,
        check=begin,
        open=False,
    ) as pool:
        consumer = consumer_of(pool, Message("orders", b"1"))
        consumer.handles("orders")(handle)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
    assert (effects(url), receipts(url)) == (["done"], 1)


async def test_a_task_left_behind_loses_no_message(url: str) -> None:
    entered, go_on, tasks = asyncio.Event(), asyncio.Event(), list[asyncio.Task[None]]()

    async def go_on_later(connection: psycopg.AsyncConnection) -> None:
        await entered.wait()
        async with connection.transaction():  # around that of the next message
            go_on.set()
            await asyncio.Event().wait()

    async def handle(connection: psycopg.AsyncConnection, message: Message) -> None:
        await connection.execute(EFFECT, [message.payload.decode()])
        if not tasks:
            tasks.append(asyncio.create_task(go_on_later(connection)))

    async with pool_of("async pool", url, size=1) as pool:
        consumer = consumer_of(pool, Message("orders", b"first"), max_in_flight=1)
        consumer.handles("orders")(handle)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
            entered.set()
            await go_on.wait()
        later = consumer_of(pool, Message("orders", b"second"), max_in_flight=1)
        later.handles("orders")(handle)
        async with running(later) as events:
            await events.wait_for(HandlerDatabaseLost)
            tasks[0].cancel()
            await events.wait_for(MessageHandled)
    assert (effects(url), receipts(url)) == (["first", "second"], 2)


async def test_a_pool_that_takes_closed_connections_back_is_refused(url: str) -> None:
    pool = AsyncConnectionPool(url, close_returns=True, open=False)
    with pytest.raises(ConfigError, match="create the pool without it"):
        consumer_of(pool)


@pytest.mark.parametrize("driver", ["psycopg async", "async pool"])
async def test_a_message_that_comes_twice_is_once_in_a_batch(
    driver: str, url: str
) -> None:
    seen: list[int] = []

    async def handle(_: Any, batch: Sequence[Message]) -> None:
        seen.append(len(batch))

    source = MemorySource(*[Message("orders", b"1")] * 3)
    terms = {"batch": 10}
    async with consuming(
        url, source, handle, terms, driver=driver, order="none"
    ) as events:
        await events.wait_for(MessageHandled)
        await events.wait_for(DuplicateSkipped, count=2)
    assert (seen, receipts(url)) == ([1], 1)


@both
async def test_a_pool_that_is_not_open_is_opened_for_the_run(
    kind: str, url: str
) -> None:
    make: Any = ConnectionPool if is_plain(kind) else AsyncConnectionPool
    pool = make(url, open=False)
    consumer = consumer_of(pool, Message("orders", b"1"))
    consumer.handles("orders")(handler_of(kind, nothing))
    async with running(consumer) as events:
        await events.wait_for(MessageHandled)
        assert not pool.closed
    assert pool.closed
    assert (effects(url), receipts(url)) == (["done"], 1)
    with pytest.raises(ConfigError, match="cannot be reused; create another pool"):
        await consumer.run()


async def test_handlers_do_not_exceed_the_pool(url: str) -> None:
    async with pool_of("async pool", url, size=2) as pool:
        consumer = consumer_of(pool, max_in_flight=3)
        consumer.handles("orders")(handler_of("async pool", nothing))
        with pytest.raises(ConfigError, match=r"at most 2 \(max_size=2\).*=2"):
            await consumer.run()


async def test_what_needs_a_session_is_refused(url: str) -> None:
    async def job(job: AsyncJob, message: Message) -> None: ...

    async def on_session(session: AsyncSession, message: Message) -> None: ...

    async def on_connection(
        connection: psycopg.AsyncConnection, message: Message
    ) -> None: ...

    def plain(connection: psycopg.Connection, message: Message) -> None: ...

    def plain_job(job: Job, message: Message) -> None: ...

    minute = timedelta(minutes=1)
    async with (
        pool_of("async pool", url) as pool,
        pool_of("pool", url) as plain_pool,
        async_sessions_of(url) as sessions,
    ):
        with sessions_of(url) as plain_sessions:
            asynchronous, threaded = consumer_of(pool), consumer_of(plain_pool)
            of_sessions = consumer_of(sessions), consumer_of(plain_sessions)
            cases: list[tuple[Any, Any, str]] = [
                (asynchronous.handles("a"), on_session, "takes a session"),
                (asynchronous.handles("a"), plain, "write async def"),
                (asynchronous.job("a", lease=minute), job, "or a job"),
                (threaded.handles("a"), on_connection, "write def"),
                (threaded.job("a", lease=minute), plain_job, "or a job"),
                (
                    of_sessions[0].handles("a"),
                    on_connection,
                    "takes a psycopg connection",
                ),
                (of_sessions[1].handles("a"), plain, "takes a psycopg connection"),
            ]
            for register, handler, match in cases:
                with pytest.raises(ConfigError, match=match):
                    register(handler)


async def test_the_database_of_a_pool_is_known_for_metrics(url: str) -> None:
    options: Any = {"application_name": "billing service", "autocommit": True}
    async with pool_of("async pool", url, **options) as pool:
        found = consumer_of(pool).database_url()
    with psycopg.connect(found) as connection:
        ((name, database),) = connection.execute(
            "SELECT current_setting('application_name'), current_database()"
        )
    assert (name, database) == ("billing service", url.rpartition("/")[2])
