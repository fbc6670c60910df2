"""A handler that returns its work instead of doing it has failed."""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

import pillarbox
from inbox.events import MessageDeadLettered, MessageHandled
from inbox.sources.memory import MemorySource
from inbox.webhook import WebhookFailed, webhook_app
from outbox.errors import ConfigError
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, Message, idempotent
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    handles,
    running,
    sessions_of,
)
from tests.fixtures.http import SECRET
from tests.fixtures.sessions import execute
from tests.fixtures.webhook import served, status_of

TERMS = pytest.mark.parametrize(
    "terms", [{}, {"batch": 2}, {"lease": timedelta(seconds=30)}], ids=str
)
MESSAGE = Message("orders.placed", b"")


async def work() -> None: ...


async def flow() -> AsyncIterator[None]:
    yield


def steps(*_: Any) -> Iterator[None]:
    yield


@functools.wraps(steps)
def decorated(*arguments: Any) -> Iterator[None]:
    return steps(*arguments)


async def returns_coroutine(_: Any, __: Any) -> Any:
    return work()


async def returns_task(_: Any, __: Any) -> Any:
    return asyncio.create_task(work())


async def returns_flow(_: Any, __: Any) -> Any:
    return flow()


async def returns_steps(_: Any, __: Any) -> Any:
    return steps()


PLAIN = pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (lambda _, __: work(), "coroutine"),
        (lambda _, __: flow(), "async_generator"),
        (lambda _, __: steps(), "generator"),
        (decorated, "generator"),
    ],
)
ASYNC = pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (returns_coroutine, "coroutine"),
        (returns_task, "Task"),
        (returns_flow, "async_generator"),
        (returns_steps, "generator"),
    ],
)


async def fail(handler: Any, terms: dict[str, Any], sessions: Any) -> str:
    """Return why the message became a dead letter."""
    consumer = Consumer(MemorySource(MESSAGE), sessions, name="billing", retry=QUICK)
    handles(consumer, "*", **terms)(handler)
    async with running(consumer) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert events.of(MessageHandled) == []
    return given_up.reason


def receipts(url: str) -> list[Any]:
    return execute(url, "SELECT * FROM inbox.receipt")


@TERMS
@PLAIN
async def test_work_that_a_plain_function_returns_is_a_failure(
    handler: Any, kind: str, terms: dict[str, Any], database_url: str
) -> None:
    with sessions_of(database_url) as sessions:
        reason = await fail(handler, terms, sessions)
    assert f"returned its work instead of doing it ({kind})" in reason
    assert receipts(database_url) == []


@TERMS
@ASYNC
async def test_work_that_a_coroutine_function_returns_is_a_failure(
    handler: Any, kind: str, terms: dict[str, Any], database_url: str
) -> None:
    async with async_sessions_of(database_url) as sessions:
        reason = await fail(handler, terms, sessions)
    assert f"returned its work instead of doing it ({kind})" in reason
    assert receipts(database_url) == []


async def test_a_webhook_whose_handler_returns_its_work_answers_500(
    database_url: str,
) -> None:
    async with async_sessions_of(database_url) as sessions:
        events = RecordedEvents()
        app = webhook_app(
            returns_coroutine,
            sessions,
            name="billing",
            secrets=[SECRET],
            observers=[events],
        )
        async with served(app) as hook:
            assert await status_of(hook, MESSAGE) == 500
    (failed,) = events.of(WebhookFailed)
    assert "returned its work instead of doing it (coroutine)" in failed.reason
    assert receipts(database_url) == []


async def test_a_webhook_whose_plain_handler_returns_its_work_answers_500(
    database_url: str,
) -> None:
    with sessions_of(database_url) as sessions:
        app = webhook_app(decorated, sessions, name="billing", secrets=[SECRET])
        async with served(app) as hook:
            assert await status_of(hook, MESSAGE) == 500
    assert receipts(database_url) == []


async def test_an_idempotent_handler_that_returns_its_work_has_failed(
    database_url: str,
) -> None:
    handle: Any = idempotent(consumer="billing")(returns_coroutine)
    async with async_sessions_of(database_url) as sessions:
        with pytest.raises(ConfigError, match="returned its work"):
            async with sessions.begin() as session:
                await handle(session, MESSAGE)
    assert receipts(database_url) == []


async def test_what_add_returns_is_no_unfinished_work(database_url: str) -> None:
    async def handle(session: Any, message: Message) -> Any:
        return pillarbox.add(session, Message("invoices.made", b""))

    async with async_sessions_of(database_url) as sessions:
        consumer = Consumer(MemorySource(MESSAGE), sessions, name="billing")
        consumer.handles("*")(handle)
        async with running(consumer) as events:
            await events.wait_for(MessageHandled)
    assert execute(database_url, "SELECT topic FROM outbox.message") == [
        ("invoices.made",)
    ]
