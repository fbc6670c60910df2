"""An error is judged with its group, cause and context, in every kind of handler."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession

from pillarbox import Consumer, DeadLetter, Message, RetryLater
from pillarbox.inbox.errors import (
    HandlerTimeoutError,
    InvalidReceiptError,
    TransactionEndedError,
)
from pillarbox.inbox.events import (
    HandlerDatabaseLost,
    HandlerFailed,
    MessageDeadLettered,
    MessageHandled,
    RetryRequested,
)
from pillarbox.inbox.handlers.outcome import Failed, Later, Outage
from pillarbox.inbox.handlers.terms import Terms
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.verdict import Fatal, Lost, Unclear, judge
from pillarbox.outbox.errors import DatabaseUnavailableError
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    consuming,
    handles,
    numbered,
)
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn
from tests.fixtures.webhook import hook_app, post, request_of, served

SECOND, HOUR = timedelta(seconds=1), timedelta(hours=1)


def lost() -> Exception:
    return OperationalError("SELECT", {}, Exception(), connection_invalidated=True)


def group(*parts: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("unhandled errors in a TaskGroup", parts)


def caused(by: Exception) -> Exception:
    error = ValueError("while charging")
    error.__cause__ = by
    return error


def meanwhile(context: Exception, *, is_suppressed: bool = False) -> Exception:
    error = ValueError("while charging")
    error.__context__ = context
    error.__suppress_context__ = is_suppressed
    return error


def circular() -> Exception:
    error = caused(ValueError("first"))
    assert error.__cause__ is not None
    error.__cause__.__context__ = error
    return error


BUSY = RetryLater(HOUR, "busy")
OUTAGE = DatabaseUnavailableError("starting up")
REFUSED = InvalidReceiptError("an id")
ENDED = TransactionEndedError()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BUSY, Later),
        (group(BUSY), Later),
        (group(group(group(BUSY))), Later),
        (group(ValueError(), BUSY, lost()), Later),
        (group(BUSY, OUTAGE), Later),
        (group(BUSY, DeadLetter("gone")), Fatal),
        (group(group(DeadLetter("gone")), lost(), ValueError()), Fatal),
        (group(ENDED, DeadLetter("gone")), Unclear),
        (group(ValueError(), REFUSED, BUSY), Fatal),
        (group(lost(), OUTAGE), Outage),
        (lost(), Lost),
        (group(lost()), Lost),
        (group(ValueError(), group(lost())), Lost),
        (caused(lost()), Lost),
        (caused(caused(group(lost()))), Lost),
        (meanwhile(lost()), Lost),
        (meanwhile(lost(), is_suppressed=True), Lost),
        (group(caused(lost())), Lost),
        (caused(BUSY), Failed),
        (meanwhile(DeadLetter("gone")), Failed),
        (group(caused(BUSY)), Failed),
        (caused(ENDED), Failed),
        (group(ValueError(), KeyError()), Failed),
        (circular(), Failed),
    ],
    ids=repr,
)
def test_the_parts_of_an_error_decide_and_what_was_replaced_doesnt(
    error: Exception, expected: type
) -> None:
    assert type(judge(error)) is expected


def test_a_decision_raised_because_of_a_lost_connection_is_a_decision() -> None:
    decision = RetryLater(HOUR)
    decision.__cause__ = lost()
    assert isinstance(judge(decision), Later)


def test_an_exceeded_time_limit_is_a_failure_whatever_was_lost() -> None:
    error = HandlerTimeoutError("bill", SECOND)
    error.__cause__ = lost()
    assert isinstance(judge(error), Failed)


def test_the_longest_delay_counts_and_other_failures_are_named() -> None:
    verdict = judge(group(RetryLater(SECOND), BUSY, ValueError("declined")))
    assert isinstance(verdict, Later)
    assert verdict.delay == HOUR
    assert "busy" in verdict.reason
    assert verdict.reason.endswith("ValueError")
    assert judge(group(BUSY)) == Later(HOUR, "busy")


@pytest.mark.parametrize(
    "permanent", [ValueError, (ValueError, KeyError), lambda e: "no" in str(e)]
)
def test_a_permanent_failure_is_dead_lettered_at_once(permanent: Any) -> None:
    is_permanent = Terms(lambda message: message, permanent=permanent).is_permanent
    failures: tuple[Exception, ...] = (
        ValueError("no such order"),
        group(OSError("busy"), group(ValueError("no such order"))),
    )
    for error in failures:
        verdict = judge(error, is_permanent)
        assert isinstance(verdict, Fatal)
        assert isinstance(verdict.error, DeadLetter)
        assert str(verdict.error).endswith("ValueError")
        assert verdict.error.__cause__ is error
    assert isinstance(judge(OSError("busy"), is_permanent), Failed)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BUSY, Later),
        (group(BUSY, ValueError()), Later),
        (lost(), Lost),
        (group(lost()), Lost),
        (OUTAGE, Outage),
    ],
    ids=repr,
)
def test_decisions_and_lost_connections_are_no_permanent_failures(
    error: Exception, expected: type
) -> None:
    is_permanent = Terms(lambda message: message, permanent=Exception).is_permanent
    assert type(judge(error, is_permanent)) is expected


async def in_task_group(*errors: Exception) -> None:
    async def fail(error: Exception) -> None:
        raise error

    async with asyncio.TaskGroup() as tasks:
        for error in errors:
            tasks.create_task(fail(error))


async def in_nested_groups(*errors: Exception) -> None:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(in_task_group(*errors))


async def in_own_group_with_a_cancellation(*errors: Exception) -> None:
    raise BaseExceptionGroup("gathered", [asyncio.CancelledError(), *errors])


async def by_except_star(*errors: Exception) -> None:
    try:
        await in_task_group(*errors, KeyError("lost"))
    except* KeyError:
        pass


GROUPS = [
    pytest.param(way, id=way.__name__)
    for way in (
        in_task_group,
        in_nested_groups,
        in_own_group_with_a_cancellation,
        by_except_star,
    )
]
Raise = Callable[..., Any]
TERMS: Any = [
    {},
    {"batch": 2},
    {"lease": timedelta(seconds=30)},
    {"time_limit": HOUR},
    {"batch": 2, "time_limit": HOUR},
]


def handlers_that(raise_: Raise, *errors: Exception) -> list[Any]:
    """Return a coroutine and a plain function that raise once, and then succeed."""
    left = [True]

    async def handle(given: Any, messages: Any) -> None:
        if left and left.pop():
            await raise_(*errors)

    def handle_in_thread(given: Any, messages: Any) -> None:
        if left and left.pop():
            asyncio.run(raise_(*errors))

    return [handle, handle_in_thread]


KINDS = [pytest.param(0, id="async"), pytest.param(1, id="plain")]


@pytest.mark.parametrize(("raise_", "terms", "kind"), in_turn(GROUPS, TERMS, KINDS))
async def test_a_decision_in_a_group_is_followed(
    raise_: Raise, terms: dict[str, Any], kind: int, database_url: str
) -> None:
    later = handlers_that(raise_, RetryLater(timedelta(0), "busy"))[kind]
    (message,) = numbered(1)
    source = MemorySource(message)
    async with consuming(database_url, source, later, terms, retry=QUICK) as events:
        await events.wait_for(MessageHandled)
    (asked,) = events.of(RetryRequested)
    assert "busy" in asked.reason
    assert events.of(HandlerFailed) == []

    dead = handlers_that(raise_, DeadLetter("gone"))[kind]
    source = MemorySource(Message("orders", b""))
    async with consuming(database_url, source, dead, terms, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert "gone" in given_up.reason
    assert given_up.attempts == 1
    assert events.of(HandlerFailed) == []


TERMINATE = "SELECT pg_terminate_backend(pg_backend_pid())"


@pytest.mark.parametrize("driver", ["psycopg async", "asyncpg"])
@pytest.mark.parametrize("terms", [{}, {"batch": 2}], ids=str)
async def test_a_lost_connection_in_a_group_caught_or_behind_an_error_is_an_outage(
    terms: dict[str, Any], driver: str, database_url: str
) -> None:
    calls: list[int] = []

    async def lose(session: AsyncSession) -> None:
        await session.execute(text(TERMINATE))

    async def handle(session: AsyncSession, messages: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(lose(session))
        elif len(calls) == 2:
            try:
                await lose(session)
            except DBAPIError:
                raise ValueError("while charging") from None
        elif len(calls) == 3:
            with suppress(DBAPIError):
                await lose(session)

    source = MemorySource(*numbered(1))
    async with consuming(
        database_url, source, handle, terms, driver=driver, retry=QUICK
    ) as events:
        await events.wait_for(MessageHandled)
    assert events.of(HandlerFailed) == []
    assert events.of(HandlerDatabaseLost)


async def test_a_failed_group_names_its_parts(database_url: str) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        await in_nested_groups(*(ValueError(f"item {n}") for n in range(7)))

    source = MemorySource(*numbered(1))
    async with consuming(database_url, source, handle, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert given_up.attempts == QUICK.max_attempts
    for reason in (given_up.reason, events.of(HandlerFailed)[0].reason):
        assert reason.count("ValueError: raised in ") == 5
        assert reason.endswith("and 2 more")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RetryLater(SECOND), 425),
        (RetryLater(timedelta(0)), 425),
        (DeadLetter("gone"), 204),
        (lost(), 503),
        (ValueError("declined"), 500),
    ],
    ids=repr,
)
async def test_a_webhook_judges_the_parts_of_a_group(
    error: Exception, status: int, database_url: str
) -> None:
    async def handle(session: AsyncSession, message: Message) -> None:
        await in_nested_groups(error)

    failed: list[Any] = []
    message = Message("orders", b"")
    async with async_sessions_of(database_url) as sessions:
        app = hook_app(handle, sessions, failed.append)
        async with served(app) as address:
            answered, _, headers = await post(
                address, request_of(message), message.payload
            )
    assert answered == status
    if status == 425:
        assert headers["retry-after"] == "1"
    if status == 500:
        assert "ValueError: raised in " in failed[0].reason


@pytest.mark.parametrize("terms", [{}, {"batch": 2}, {"lease": HOUR}], ids=str)
async def test_a_retry_of_a_dead_letter_judges_the_parts_of_a_group(
    terms: dict[str, Any], database_url: str
) -> None:
    give_up(database_url, *numbered(1), schema="inbox")
    errors: list[Exception] = [BUSY, ValueError("declined")]

    async def handle(given: Any, messages: Any) -> None:
        await in_nested_groups(errors.pop(0))

    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(), sessions, name="billing")
        handles(consumer, "orders", **terms)(handle)
        await retry(consumer.retrier())
        query = (
            "SELECT retry_count, retry_after > now() + '50min', error_reason"
            " FROM inbox.dead_letter"
        )
        assert execute(database_url, query) == [(0, True, "busy")]
        execute(database_url, "UPDATE inbox.dead_letter SET retry_after = now()")
        await retry(consumer.retrier())
    ((failures, _, reason),) = execute(database_url, query)
    assert failures == 1
    assert "ValueError: raised in " in reason
