"""A handler that can't be called is refused when it is registered."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Consumer, Message, idempotent
from pillarbox.inbox.jobs.job import AsyncJob, Job
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.webhook import WebhookApp
from pillarbox.outbox.errors import ConfigError
from tests.fixtures.consumers import handles

LONG = {"lease": timedelta(seconds=5)}
MANY = {"batch": 10}
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def register(handler: Any, *, asynchronous: bool = False, **terms: Any) -> None:
    sessions: Any = async_sessionmaker() if asynchronous else sessionmaker()
    consumer = Consumer(MemorySource(), sessions, name="billing")
    handles(consumer, "t", **terms)(handler)


class Billing:
    pass


class Handlers:
    def bill(self, session: Session, message: Message) -> None: ...

    async def bill_async(self, session: AsyncSession, message: Message) -> None: ...

    def __call__(self, session: Session, message: Message) -> None: ...

    @staticmethod
    def static(session: Session, message: Message) -> None: ...


def three(prefix: str, session: Session, message: Message) -> None: ...
def many(session: Session, messages: Sequence[Message]) -> None: ...
async def long(job: AsyncJob, message: Message) -> None: ...
def undeclared(session: Unknown, message: Message) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def unannotated(session, message): ...  # type: ignore[no-untyped-def]
def anything(session: Any, message: object) -> None: ...
def scalar(session: Session, number: int) -> None: ...
def service(session: Session, message: Message, billing: Billing) -> None: ...
def twice(session: Session, message: Message, again: Message) -> None: ...


@pytest.mark.parametrize(
    ("handler", "terms"),
    [
        (Handlers().bill, {}),
        (Handlers(), {}),
        (Handlers.static, {}),
        (functools.partial(three, "a"), {}),
        (lambda session, message: None, {}),
        (lambda *args: None, {}),
        (print, {}),
        (Mock(), {}),
        (unannotated, {}),
        (anything, {}),
        (many, MANY),
    ],
)
def test_any_callable_handler_is_registered(
    handler: Any, terms: dict[str, Any]
) -> None:
    register(handler, **terms)


@pytest.mark.parametrize(
    ("handler", "terms"),
    [
        (Handlers().bill_async, {}),
        (functools.partial(Handlers().bill_async), {}),
        (AsyncMock(), {}),
        (long, LONG),
    ],
)
def test_any_awaitable_handler_is_registered(
    handler: Any, terms: dict[str, Any]
) -> None:
    register(handler, asynchronous=True, **terms)


def none() -> None: ...
def one(message: Message) -> None: ...
def keyword(session: Session, message: Message, *, name: str) -> None: ...
def yields(session: Session, message: Message) -> Iterator[None]:
    yield


def of_job(job: Job, message: Message) -> None: ...
def of_async(session: AsyncSession, message: Message) -> None: ...
async def of_sync(session: Session, message: Message) -> None: ...
async def gives(session: AsyncSession, message: Message) -> Any:
    yield


@pytest.mark.parametrize(
    ("handler", "terms", "problem"),
    [
        (none, {}, r"none\(\): must accept \(session, message\), but takes"),
        (one, {}, r"one\(message\): must accept \(session, message\), but takes"),
        (
            three,
            {},
            r"argument 'prefix' has the unsupported annotation <class 'str'>; use",
        ),
        (
            scalar,
            {},
            r"argument 'number' has the unsupported annotation <class 'int'>; use",
        ),
        (service, {}, r"argument 'billing' has the unsupported annotation .*Billing"),
        (
            undeclared,
            {},
            r"can't resolve the annotation 'Unknown' of argument 'session'",
        ),
        (
            twice,
            {},
            r"again\): must accept \(session, message\), but takes 3 arguments",
        ),
        (keyword, {}, r"name\): must accept \(session, message\), but takes"),
        (Handlers.bill, {}, "pass the method of an object"),
        (Handlers, {}, "Handlers: is a class; pass a function"),
        ("orders", {}, "'orders': can't be called"),
        (yields, {}, "yields: is a generator, so calling it runs nothing"),
        (one, LONG, r"must accept \(job, message\), but takes 1 argument"),
        (Handlers().bill, LONG, r"Session'>; .*take \(Job, Message\), or"),
        (of_job, {}, r"Job'>; .*take \(Session, Message\), or register"),
        (one, MANY, r"Message'>; .*\(Session, Sequence\[Message\]\), or"),
        (many, {}, r"Message\]; .*take \(Session, Message\), or register"),
        (
            of_async,
            {},
            r"AsyncSession'>; write async def, or .*\(Session, Mess",
        ),
    ],
)
def test_a_handler_that_is_not_callable_is_refused(
    handler: Any, terms: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        register(handler, **terms)


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (gives, "gives: is a generator, so calling"),
        (
            of_sync,
            r"Session'>; write def, or .* \(AsyncSession, Message\), or",
        ),
    ],
)
def test_a_handler_that_is_not_awaitable_is_refused(handler: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        register(handler, asynchronous=True)


def test_a_decorator_without_a_topic_is_refused() -> None:
    consumer = Consumer(MemorySource(), sessionmaker(), name="billing")
    with pytest.raises(ConfigError, match=r"one: is a function; pass the topic first"):
        consumer.handles(one)  # type: ignore[arg-type]


def test_an_idempotent_function_is_checked_when_it_is_decorated() -> None:
    guard: Callable[..., Any] = idempotent(consumer="billing")
    with pytest.raises(ConfigError, match=r"one\(message\): must accept"):
        guard(one)


def test_an_idempotent_function_accepts_any_kind_of_message() -> None:
    def of_rows(session: Session, rows: list[dict[str, int]]) -> None: ...
    def of_record(session: Session, record: tuple[str, bytes]) -> None: ...

    for handler in (of_rows, of_record):
        decorate: Callable[..., Any] = idempotent(consumer="billing")
        assert callable(decorate(handler))


def test_the_handlers_of_a_webhook_are_checked() -> None:
    handler: Any = one
    with pytest.raises(ConfigError, match=r"one\(message\): must accept"):
        WebhookApp(handler, sessionmaker(), name="billing", secrets=[SECRET])
