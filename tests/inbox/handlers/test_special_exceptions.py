"""Whatever a handler raises is a failed attempt, also what asyncio treats specially."""

import asyncio
import concurrent.futures
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from inbox.jobs.job import AsyncJob, Job
from inbox.sources.memory import MemorySource
from inbox.webhook import WebhookFailed, webhook_app
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, Message
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    handles,
    numbered,
    running,
    sessions_of,
)
from tests.fixtures.http import SECRET
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn
from tests.fixtures.webhook import served, status_of

EFFECT = text("INSERT INTO effect (what) VALUES (:what)")
LONG = {"lease": timedelta(seconds=30)}


class Abort(BaseException):
    """An exception that `except Exception` doesn't catch."""


TERMS: Any = [{}, {"batch": 2}, LONG]


def with_terms(errors: dict[BaseException, str]) -> pytest.MarkDecorator:
    """Try each error with each kind of handler; most as variants."""
    given = [
        pytest.param(error, f"the handler raised {said}", id=type(error).__name__)
        for error, said in errors.items()
    ]
    return pytest.mark.parametrize(("error", "said", "terms"), in_turn(given, TERMS))


ERRORS = with_terms(
    {
        SystemExit(0): "SystemExit: 0",
        GeneratorExit(): "GeneratorExit",
        Abort("no"): "Abort: no",
        BaseExceptionGroup("many", [Abort()]): "BaseException",
        asyncio.CancelledError(): "CancelledError",
    }
)
ONLY_IN_THREADS = with_terms(
    {
        StopIteration(): "StopIteration",
        KeyboardInterrupt(): "KeyboardInterrupt",
        concurrent.futures.CancelledError(): "CancelledError",
    }
)


@pytest.fixture
def url(database_url: str) -> str:
    execute(database_url, "CREATE TABLE effect (what text)")
    return database_url


def plain(error: BaseException) -> Any:
    """Return a plain function that fails for the message 0."""

    def handle(given: Any, messages: Any) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            if isinstance(given, Job):
                write_in_job(given, message, error)
            else:
                write(given, message, error)

    return handle


def write_in_job(job: Job, message: Message, error: BaseException) -> None:
    with job.transaction() as session:
        write(session, message, error)


def write(session: Session, message: Message, error: BaseException) -> None:
    session.execute(EFFECT, {"what": message.payload.decode()})
    if message.payload == b"0":
        raise error


def asynchronous(error: BaseException) -> Any:
    """Return a coroutine function that fails for the message 0."""

    async def handle(given: Any, messages: Any) -> None:
        for message in messages if isinstance(messages, list) else [messages]:
            if isinstance(given, AsyncJob):
                async with given.transaction() as session:
                    await write_async(session, message, error)
            else:
                await write_async(given, message, error)

    return handle


async def write_async(
    session: AsyncSession, message: Message, error: BaseException
) -> None:
    await session.execute(EFFECT, {"what": message.payload.decode()})
    if message.payload == b"0":
        raise error


async def check_failure(handler: Any, terms: Any, sessions: Any, said: str) -> None:
    # Two keys fill a batch, and the message 2 follows the failing one.
    source = MemorySource(*numbered(4, keys=2))
    consumer = Consumer(source, sessions, name="billing", retry=QUICK)
    handles(consumer, "*", **terms)(handler)
    async with running(consumer) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
        await events.wait_for(MessageHandled, 3)
    assert said in given_up.reason
    assert len(events.of(HandlerFailed)) == 2
    assert len(source.acked) == 4


def effects(url: str) -> list[str]:
    return [what for (what,) in execute(url, "SELECT what FROM effect ORDER BY what")]


@ERRORS
async def test_a_special_exception_of_a_coroutine_function_is_a_failed_attempt(
    error: BaseException, said: str, terms: dict[str, Any], url: str
) -> None:
    async with async_sessions_of(url) as sessions:
        await check_failure(asynchronous(error), terms, sessions, said)
    assert effects(url) == ["1", "2", "3"]


async def check_failure_in_thread(
    error: BaseException, said: str, terms: dict[str, Any], url: str
) -> None:
    with sessions_of(url) as sessions:
        await check_failure(plain(error), terms, sessions, said)
    assert effects(url) == ["1", "2", "3"]


@ERRORS
async def test_a_special_exception_of_a_plain_function_is_a_failed_attempt(
    error: BaseException, said: str, terms: dict[str, Any], url: str
) -> None:
    await check_failure_in_thread(error, said, terms, url)


@ONLY_IN_THREADS
async def test_an_exception_that_no_future_takes_is_a_failed_attempt(
    error: BaseException, said: str, terms: dict[str, Any], url: str
) -> None:
    await check_failure_in_thread(error, said, terms, url)


@pytest.mark.parametrize("kind", [plain, asynchronous])
async def test_a_webhook_answers_500_to_a_special_exception(
    kind: Any, url: str
) -> None:
    handler, events = kind(SystemExit(0)), RecordedEvents()
    options: Any = {"name": "billing", "secrets": [SECRET], "observers": [events]}
    async with async_sessions_of(url) as async_sessions:
        with sessions_of(url) as sessions:
            chosen: Any = sessions if kind is plain else async_sessions
            async with served(webhook_app(handler, chosen, **options)) as hook:
                assert await status_of(hook, Message("orders", b"0")) == 500
                assert await status_of(hook, Message("orders", b"1")) == 204
    (failed,) = events.of(WebhookFailed)
    assert "the handler raised SystemExit: 0" in failed.reason
    assert effects(url) == ["1"]


async def test_a_webhook_answers_500_to_a_stop_iteration(url: str) -> None:
    with sessions_of(url) as sessions:
        handler = plain(StopIteration())
        app = webhook_app(handler, sessions, name="billing", secrets=[SECRET])
        async with served(app) as hook:
            assert await status_of(hook, Message("orders", b"0")) == 500
    assert effects(url) == []
