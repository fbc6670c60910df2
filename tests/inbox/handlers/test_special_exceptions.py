"""Whatever a handler raises is a failed attempt, also what asyncio treats specially."""

import asyncio
import concurrent.futures
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from inbox.events import HandlerFailed, MessageDeadLettered, MessageHandled
from inbox.jobs.job import AsyncJob, Job
from inbox.sources.memory import MemorySource
from inbox.webhook import WebhookFailed, webhook_app
from outbox.testing.events import RecordedEvents
from pillarbox import Message
from tests.fixtures.consumers import QUICK, consuming, numbered, sessions_by
from tests.fixtures.effects import EFFECT, effects
from tests.fixtures.http import SECRET
from tests.fixtures.variants import in_turn
from tests.fixtures.webhook import served, status_of

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


async def check_failure(
    handler: Any, said: str, terms: dict[str, Any], url: str
) -> None:
    # Two keys fill a batch, and the message 2 follows the failing one.
    source = MemorySource(*numbered(4, keys=2))
    async with consuming(url, source, handler, terms, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
        await events.wait_for(MessageHandled, 3)
    assert said in given_up.reason
    assert len(events.of(HandlerFailed)) == 2
    assert len(source.acked) == 4
    assert effects(url) == ["1", "2", "3"]


@ERRORS
async def test_a_special_exception_of_a_coroutine_function_is_a_failed_attempt(
    error: BaseException, said: str, terms: dict[str, Any], url: str
) -> None:
    await check_failure(asynchronous(error), said, terms, url)


@ERRORS
async def test_a_special_exception_of_a_plain_function_is_a_failed_attempt(
    error: BaseException, said: str, terms: dict[str, Any], url: str
) -> None:
    await check_failure(plain(error), said, terms, url)


@ONLY_IN_THREADS
async def test_an_exception_that_no_future_takes_is_a_failed_attempt(
    error: BaseException, said: str, terms: dict[str, Any], url: str
) -> None:
    await check_failure(plain(error), said, terms, url)


@pytest.mark.parametrize(
    ("kind", "error", "said"),
    [
        (plain, SystemExit(0), "SystemExit: 0"),
        (asynchronous, SystemExit(0), "SystemExit: 0"),
        (plain, StopIteration(), "StopIteration"),
    ],
)
async def test_a_webhook_answers_500_to_a_special_exception(
    kind: Any, error: BaseException, said: str, url: str
) -> None:
    events = RecordedEvents()
    options: Any = {"name": "billing", "secrets": [SECRET], "observers": [events]}
    driver = "psycopg" if kind is plain else "asyncpg"
    async with (
        sessions_by(url, driver) as sessions,
        served(webhook_app(kind(error), sessions, **options)) as hook,
    ):
        assert await status_of(hook, Message("orders", b"0")) == 500
        assert await status_of(hook, Message("orders", b"1")) == 204
    (failed,) = events.of(WebhookFailed)
    assert f"the handler raised {said}" in failed.reason
    assert effects(url) == ["1"]
