"""A handler that returns its work instead of doing it has failed."""

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any

import pytest

import pillarbox
from pillarbox import Message, idempotent
from pillarbox.inbox.events import MessageDeadLettered, MessageHandled
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.consumers import (
    QUICK,
    async_sessions_of,
    consuming,
)
from tests.fixtures.sessions import execute
from tests.fixtures.variants import in_turn

TERMS: Any = [{}, {"batch": 2}, {"lease": timedelta(seconds=30)}]
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


def returns_steps_in_thread(_: Any, __: Any) -> Any:
    return steps()


HANDLERS: Any = [
    pytest.param(lambda _, __: work(), "coroutine", id="plain, coroutine"),
    pytest.param(lambda _, __: flow(), "async_generator", id="plain, flow"),
    pytest.param(returns_steps_in_thread, "generator", id="plain, generator"),
    pytest.param(decorated, "generator", id="decorated"),
    pytest.param(returns_coroutine, "coroutine", id="coroutine"),
    pytest.param(returns_task, "Task", id="task"),
    pytest.param(returns_flow, "async_generator", id="flow"),
    pytest.param(returns_steps, "generator", id="generator"),
]


def receipts(url: str) -> list[Any]:
    return execute(url, "SELECT * FROM inbox.receipt")


@pytest.mark.parametrize(("handler", "returned", "terms"), in_turn(HANDLERS, TERMS))
async def test_work_that_a_handler_returns_is_a_failure(
    handler: Any, returned: str, terms: dict[str, Any], database_url: str
) -> None:
    source = MemorySource(MESSAGE)
    async with consuming(database_url, source, handler, terms, retry=QUICK) as events:
        (given_up,) = await events.wait_for(MessageDeadLettered)
    assert events.of(MessageHandled) == []
    assert f"returned a {returned} that" in given_up.reason
    assert receipts(database_url) == []


async def test_an_idempotent_handler_that_returns_its_work_has_failed(
    database_url: str,
) -> None:
    handle: Any = idempotent(consumer="billing")(returns_coroutine)
    async with async_sessions_of(database_url) as sessions:
        with pytest.raises(ConfigError, match="returned a "):
            async with sessions.begin() as session:
                await handle(session, MESSAGE)
    assert receipts(database_url) == []


async def test_what_add_returns_is_no_unfinished_work(database_url: str) -> None:
    async def handle(session: Any, message: Message) -> Any:
        return pillarbox.add(session, Message("invoices.made", b""))

    async with consuming(database_url, MemorySource(MESSAGE), handle) as events:
        await events.wait_for(MessageHandled)
    assert execute(database_url, "SELECT topic FROM outbox.message") == [
        ("invoices.made",)
    ]
