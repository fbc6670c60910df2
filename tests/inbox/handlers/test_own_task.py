"""Whatever a handler raises, or does to its task and its context, ends its attempt."""

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from pillarbox import Message, RetryLater
from pillarbox.inbox.events import (
    ConsumerStopped,
    HandlerDatabaseLost,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
)
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox import gather as gather_module
from pillarbox.outbox.retry import RetryPolicy
from tests.fixtures.consumers import (
    QUICK,
    consuming,
    numbered,
)
from tests.fixtures.effects import EFFECT, effects
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn
from tests.fixtures.waiting import wait_for

TERMS: Any = [{}, {"batch": 2}, {"lease": timedelta(seconds=30)}]
KINDS = pytest.mark.parametrize("kind", TERMS, ids=str)
TENANT: ContextVar[str] = ContextVar("tenant", default="nobody")


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


def own_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


class Abort(BaseException):
    """An exception that `except Exception` doesn't catch."""


ERRORS: dict[BaseException, str] = {
    SystemExit(0): "the handler raised SystemExit",
    GeneratorExit(): "the handler raised GeneratorExit",
    Abort("no"): "the handler raised Abort",
    BaseExceptionGroup("many", [Abort()]): "test_own_task.py, line",
    asyncio.CancelledError(): "the handler raised CancelledError",
}
# No future takes these.
ONLY_IN_THREADS: dict[BaseException, str] = {
    StopIteration(): "the handler raised StopIteration",
    KeyboardInterrupt(): "the handler raised KeyboardInterrupt",
    concurrent.futures.CancelledError(): "the handler raised CancelledError",
}


def raising(error: BaseException) -> Callable[[], Awaitable[None]]:
    async def fail() -> None:
        raise error

    return fail


FAILURES: list[Any] = [
    pytest.param(fail_in_a_task_group, "ExceptionGroup", id="a task group"),
    pytest.param(cancel_and_wait, "CancelledError", id="cancel and wait"),
    pytest.param(cancel_and_return, "CancelledError", id="cancel and return"),
    *(
        pytest.param(raising(error), said, id=type(error).__name__)
        for error, said in ERRORS.items()
    ),
]


@pytest.mark.parametrize(
    ("fail", "said", "kind", "driver"),
    in_turn(FAILURES, TERMS, ["psycopg async", "asyncpg"]),
)
async def test_a_special_failure_of_a_coroutine_is_retried_and_dead_lettered(
    fail: Callable[[], Awaitable[None]],
    said: str,
    kind: dict[str, Any],
    driver: str,
    url: str,
) -> None:
    # Two keys fill a batch; the message 2 follows the failing one.
    source, calls = MemorySource(*numbered(4, keys=2)), []

    async def handle(given: Any, messages: Any) -> None:
        names = names_of(messages)
        calls.append(names)
        if "0" in names:
            if not isinstance(given, AsyncJob):
                await write(given, names)
            await fail()
        else:
            await write(given, names)

    async with consuming(
        url, source, handle, kind, driver=driver, retry=QUICK
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
        await events.wait_for(MessageHandled, 3)
    assert said in given_up.reason
    assert [failed.attempts for failed in events.of(HandlerFailed)] == [1, 2]
    # Its next message never overtook it.
    order = [name for names in calls for name in names if name in "02"]
    assert order == [*["0"] * (len(order) - 1), "2"]
    assert effects(url) == ["1", "2", "3"]
    assert len(source.acked) == 4


@pytest.mark.parametrize(
    ("error", "said", "kind"),
    in_turn(
        [
            pytest.param(error, said, id=type(error).__name__)
            for error, said in (ERRORS | ONLY_IN_THREADS).items()
        ],
        TERMS,
    ),
)
async def test_a_special_exception_of_a_plain_function_is_a_failed_attempt(
    error: BaseException, said: str, kind: dict[str, Any], url: str
) -> None:
    def insert(session: Session, names: list[str]) -> None:
        session.execute(EFFECT, [{"what": name} for name in names])
        if "0" in names:
            raise error

    def handle(given: Any, messages: Any) -> None:
        if isinstance(given, Job):
            with given.transaction() as session:
                insert(session, names_of(messages))
        else:
            insert(given, names_of(messages))

    source = MemorySource(*numbered(4, keys=2))
    async with consuming(url, source, handle, kind, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
        await events.wait_for(MessageHandled, 3)
    assert said in given_up.reason
    assert len(events.of(HandlerFailed)) == 2
    assert len(source.acked) == 4
    assert effects(url) == ["1", "2", "3"]


def in_task_and_thread(do: Callable[[Any], None]) -> list[Callable[..., Any]]:
    """Return a coroutine function and a plain function that do the same."""

    async def handle(given: Any, messages: Any) -> None:
        do(messages)

    def handle_in_thread(given: Any, messages: Any) -> None:
        do(messages)

    return [handle, handle_in_thread]


IS_ASYNC: list[Any] = [pytest.param(0, id="async"), pytest.param(1, id="plain")]


@pytest.mark.parametrize(("kind", "which"), in_turn(TERMS, IS_ASYNC))
async def test_a_context_variable_is_unset_for_the_next_attempt_and_message(
    which: int, kind: dict[str, Any], url: str
) -> None:
    seen: list[str] = []

    def note(messages: Any) -> None:
        seen.append(TENANT.get())
        TENANT.set("acme")
        if "0" in names_of(messages) and len(seen) < 3:
            if len(seen) == 1:
                raise RetryLater(timedelta(0), "not yet")
            raise ValueError("declined")

    handler = in_task_and_thread(note)[which]
    source = MemorySource(*numbered(2))
    async with consuming(url, source, handler, kind, retry=QUICK) as events:
        await events.wait_for(MessageHandled, 2)
    assert seen == ["nobody"] * 4
    assert TENANT.get() == "nobody"


@KINDS
async def test_a_stop_waits_for_an_attempt_that_swallows_its_cancellation(
    kind: dict[str, Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather_module, "_CANCEL_AGAIN", 0.2)
    begun, swallowed, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

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

    source, before = MemorySource(*numbered(1)), asyncio.all_tasks()
    async with consuming(url, source, handle, kind, drain=timedelta(0)) as events:
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
    async def handle(session: AsyncSession, message: Message) -> None:
        with pytest.raises(ExceptionGroup):
            await fail_in_a_task_group()
        await asyncio.Event().wait()

    source = MemorySource(*numbered(1))
    terms = {"time_limit": timedelta(milliseconds=20)}
    async with consuming(url, source, handle, terms, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert "HandlerTimeoutError" in given_up.reason


@pytest.mark.parametrize("kind", TERMS, ids=str)
async def test_other_code_of_the_user_has_a_context_of_its_own_and_can_raise_anything(
    kind: dict[str, Any], url: str
) -> None:
    found: list[str] = []
    redacted, judged, upcasted = (ContextVar[str](name) for name in "abc")

    def look(variable: ContextVar[str]) -> None:
        found.append(variable.get("nobody"))
        variable.set("acme")

    def redact(text: str) -> str:
        look(redacted)
        return text

    def is_permanent(error: Exception) -> bool:
        look(judged)
        raise SystemExit("no predicate")

    def upcast(message: Message) -> bytes:
        look(upcasted)
        return message.payload

    async def handle(given: Any, messages: Any) -> None:
        if "0" in names_of(messages):
            raise ValueError("declined")

    source = MemorySource(*numbered(2, keys=2))
    terms = {"version": 2, "permanent": is_permanent, **kind}
    async with consuming(
        url, source, handle, terms, upcast=upcast, retry=QUICK, redact=redact
    ) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
        await events.wait_for(MessageHandled)
    assert "the handler raised SystemExit: raised in " in given_up.reason
    assert set(found) == {"nobody"}


SLEEPING = """
    SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND query = 'SELECT pg_sleep(6)'
       AND state = 'active'
"""
LEFT = [pytest.param(True, id="fails"), pytest.param(False, id="returns")]


@pytest.mark.parametrize(
    ("fails", "kind", "driver"),
    in_turn(LEFT, [{}, {"batch": 2}], ["asyncpg", "psycopg async"]),
)
async def test_a_statement_that_outlives_its_handler_costs_other_messages_nothing(
    fails: bool, kind: dict[str, Any], driver: str, url: str
) -> None:
    left: list[asyncio.Task[Any]] = []

    async def sleep(session: AsyncSession) -> None:
        await session.execute(text("SELECT pg_sleep(6)"))

    async def fail() -> None:
        await asyncio.to_thread(
            wait_for, "it sleeps", lambda: execute(url, SLEEPING) == [(1,)]
        )
        if fails:
            raise ValueError("declined")

    async def handle(session: AsyncSession, messages: Any) -> None:
        names = names_of(messages)
        if "1" in names:
            await write(session, ["1"])
        if "0" in names:
            left.append(asyncio.create_task(sleep(session)))
            await fail()

    once = RetryPolicy(max_attempts=1)
    source = MemorySource(*numbered(2, keys=2))
    async with consuming(
        url, source, handle, kind, driver=driver, retry=once
    ) as events:
        if fails:
            (given_up,) = await events.wait_for(MessageDeadLettered)
            assert given_up.reason.startswith("ValueError: raised in ")
        elif driver == "asyncpg":  # psycopg's COMMIT waits for the statement
            await events.wait_for(MessageDeadLettered)
        await events.wait_for(MessageHandled)
    await asyncio.gather(*left, return_exceptions=True)
    assert events.of(HandlerDatabaseLost) == []
    assert effects(url) == ["1"]
