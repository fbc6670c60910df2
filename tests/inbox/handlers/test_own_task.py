"""What a handler does to its task and its context ends with its attempt."""

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from inbox.events import (
    ConsumerStopped,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from inbox.jobs.job import AsyncJob
from inbox.sources.memory import MemorySource
from outbox import gather as gather_module
from pillarbox import Consumer, Message, RetryLater
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    handles,
    numbered,
    running,
    sessions_of,
)
from tests.fixtures.sessions import execute

KINDS = pytest.mark.parametrize(
    "kind", [{}, {"batch": 2}, {"lease": timedelta(seconds=30)}], ids=str
)
EFFECT = text("INSERT INTO effect (what) VALUES (:what)")
TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


def effects(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM effect ORDER BY what")]


def names_of(given: Any) -> list[str]:
    return [m.payload.decode() for m in (given if isinstance(given, list) else [given])]


async def write(given: Any, names: list[str]) -> None:
    rows = [{"what": name} for name in names]
    if isinstance(given, AsyncJob):
        async with given.transaction() as session:
            await session.execute(EFFECT, rows)
    else:
        await given.execute(EFFECT, rows)


async def fail_in_a_task_group() -> None:
    async def charge() -> None:
        raise ValueError("declined")

    async with asyncio.TaskGroup() as group:
        group.create_task(charge())


async def cancel_and_wait() -> None:
    own_task().cancel()
    await asyncio.Event().wait()


async def cancel_and_return() -> None:
    own_task().cancel()


async def let_a_child_cancel() -> None:
    asyncio.get_running_loop().call_soon(own_task().cancel)
    await asyncio.Event().wait()


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


@KINDS
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (fail_in_a_task_group, "ExceptionGroup"),
        (cancel_and_wait, "CancelledError"),
        (cancel_and_return, "CancelledError"),
        (let_a_child_cancel, "CancelledError"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
async def test_a_failure_that_cancels_the_handlers_task_is_retried_and_dead_lettered(
    fail: Callable[[], Awaitable[None]],
    reason: str,
    driver: str,
    kind: dict[str, Any],
    url: str,
) -> None:
    # Two keys fill a batch; the message 2 follows the failing one.
    source, calls = MemorySource(*numbered(4, keys=2)), []
    async with async_sessions_of(url, driver) as sessions:
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)

        @handles(consumer, "*", **kind)
        async def handle(given: Any, messages: Any) -> None:
            names = names_of(messages)
            calls.append(names)
            if "0" in names:
                if not isinstance(given, AsyncJob):
                    await write(given, names)
                await fail()
            else:
                await write(given, names)

        async with running(consumer) as events:
            (given_up,) = await events.wait_for(MessageDeadLettered)
            await events.wait_for(MessageHandled, 3)
    assert reason in given_up.reason
    assert [failed.attempts for failed in events.of(HandlerFailed)] == [1, 2]
    # Its next message never overtook it.
    order = [name for names in calls for name in names if name in "02"]
    assert order == [*["0"] * (len(order) - 1), "2"]
    assert effects(url) == ["1", "2", "3"]
    assert len(source.acked) == 4


async def test_many_failures_in_task_groups_hold_up_no_other_key(url: str) -> None:
    failing = [Message("failing", b"", key=f"failing {n}") for n in range(60)]
    source = MemorySource(*failing, *numbered(10, keys=10))
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            source, sessions, name="billing", retry=QUICK, max_waiting=20
        )

        @consumer.handles("failing")
        async def fail(session: AsyncSession, message: Message) -> None:
            await fail_in_a_task_group()

        @consumer.handles("orders")
        async def handle(session: AsyncSession, message: Message) -> None: ...

        async with running(consumer) as events:
            await events.wait_for(MessageDeadLettered, 60)
            await events.wait_for(MessageHandled, 10)


@KINDS
async def test_a_cancellation_that_comes_after_the_attempt_reaches_no_other_message(
    kind: dict[str, Any], url: str
) -> None:
    tasks: list[asyncio.Task[Any]] = []
    async with async_sessions_of(url) as sessions:
        source = MemorySource(*numbered(3))
        consumer = Consumer(source, sessions, name="billing", retry=QUICK)

        @handles(consumer, "*", **kind)
        async def handle(given: Any, messages: Any) -> None:
            # As a watchdog does that nobody has stopped.
            assert not any(task.cancel() for task in tasks)
            tasks.append(own_task())

        async with running(consumer) as events:
            await events.wait_for(MessageHandled, 3)
    assert events.of(HandlerFailed) == []


@KINDS
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
async def test_a_context_variable_is_unset_for_the_next_attempt_and_message(
    is_async: bool, kind: dict[str, Any], url: str
) -> None:
    seen: list[str] = []

    def note(messages: Any) -> None:
        seen.append(TENANT.get())
        TENANT.set("acme")
        if "0" in names_of(messages) and len(seen) < 3:
            if len(seen) == 1:
                raise RetryLater(timedelta(0), "not yet")
            raise ValueError("declined")

    async def handle(given: Any, messages: Any) -> None:
        note(messages)

    def handle_in_thread(given: Any, messages: Any) -> None:
        note(messages)

    messages = numbered(2)
    async with async_sessions_of(url) as async_sessions:
        with sessions_of(url) as sessions:
            chosen: Any = async_sessions if is_async else sessions
            consumer = Consumer(
                MemorySource(*messages), chosen, name="billing", retry=QUICK
            )
            handles(consumer, "*", **kind)(handle if is_async else handle_in_thread)
            async with running(consumer) as events:
                await events.wait_for(MessageHandled, 2)
    assert seen == ["nobody"] * 4
    assert TENANT.get() == "nobody"


@KINDS
@pytest.mark.parametrize("is_async", [True, False], ids=["async", "plain"])
@pytest.mark.parametrize("setter", ["upcaster", "predicate", "redact"])
async def test_a_context_variable_that_other_code_of_the_user_sets_is_unset_as_well(
    setter: str, is_async: bool, kind: dict[str, Any], url: str
) -> None:
    found: list[str] = []

    def note(name: str) -> None:
        if name == setter:
            found.append(TENANT.get())
            TENANT.set("acme")

    def redact(said: str) -> str:
        note("redact")
        return said

    def is_permanent(error: Exception) -> bool:
        note("predicate")
        return False

    def fail(given: Any, messages: Any) -> None:
        raise ValueError("declined")

    async def fail_async(given: Any, messages: Any) -> None:
        raise ValueError("declined")

    async with async_sessions_of(url) as async_sessions:
        with sessions_of(url) as sessions:
            chosen: Any = async_sessions if is_async else sessions
            source = MemorySource(*numbered(2))
            consumer = Consumer(
                source, chosen, name="billing", retry=QUICK, redact=redact
            )
            handles(consumer, "*", version=2, permanent=is_permanent, **kind)(
                fail_async if is_async else fail
            )

            @consumer.upcasts("*", to=2)
            def upcast(message: Message) -> bytes:
                note("upcaster")
                return message.payload

            async with running(consumer) as events:
                await events.wait_for(MessageDeadLettered, 2)
    assert len(found) >= 6
    assert set(found) == {"nobody"}


@KINDS
async def test_a_stop_waits_for_an_attempt_that_swallows_its_cancellation(
    kind: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_module, "_CANCEL_AGAIN", 0.2)
    begun, swallowed, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            MemorySource(*numbered(1)), sessions, name="billing", drain=timedelta(0)
        )

        @handles(consumer, "*", **kind)
        async def handle(given: Any, messages: Any) -> None:
            try:
                begun.set()
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    swallowed.set()
                await asyncio.Event().wait()
            finally:
                ended.set()

        before = asyncio.all_tasks()
        async with running(consumer) as events:
            await begun.wait()
        assert swallowed.is_set()
        assert ended.is_set()
        left = asyncio.all_tasks() - before
        assert not [task for task in left if "handle" in repr(task.get_coro())]
    (stopped,) = events.of(ConsumerStopped)
    assert stopped.returned == 1
    assert effects(url) == []


async def test_a_time_limit_ends_a_handler_whose_task_group_failed_before(
    url: str,
) -> None:
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            MemorySource(*numbered(1)), sessions, name="billing", retry=QUICK
        )

        @consumer.handles("*", time_limit=timedelta(milliseconds=20))
        async def handle(session: AsyncSession, message: Message) -> None:
            with pytest.raises(ExceptionGroup):
                await fail_in_a_task_group()
            await asyncio.Event().wait()

        async with running(consumer) as events:
            (given_up,) = await events.wait_for(MessageDeadLettered)
    assert "HandlerTimeoutError" in given_up.reason


@KINDS
async def test_a_predicate_that_raises_fails_the_attempt(
    kind: dict[str, Any], url: str
) -> None:
    def is_permanent(error: Exception) -> bool:
        raise SystemExit("no predicate")

    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            MemorySource(*numbered(2, keys=2)), sessions, name="billing", retry=QUICK
        )

        @handles(consumer, "*", permanent=is_permanent, **kind)
        async def handle(given: Any, messages: Any) -> None:
            if "0" in names_of(messages):
                raise ValueError("declined")

        async with running(consumer) as events:
            (given_up,) = await events.wait_for(MessageDeadLettered)
            await events.wait_for(MessageHandled)
    assert "the handler raised SystemExit: no predicate" in given_up.reason


async def test_a_redaction_that_exits_hides_the_text_and_ends_no_process(
    url: str,
) -> None:
    def redact(said: str) -> str:
        raise SystemExit("no redaction")

    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            MemorySource(*numbered(1)),
            sessions,
            name="billing",
            retry=QUICK,
            redact=redact,
        )

        @consumer.handles("*")
        async def handle(session: AsyncSession, message: Message) -> None:
            raise ValueError("declined")

        async with running(consumer) as events:
            (given_up,) = await events.wait_for(MessageDeadLettered)
    assert given_up.reason == "left out: redact raised RuntimeError"
