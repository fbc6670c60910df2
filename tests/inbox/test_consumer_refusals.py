"""A consumer refuses handlers, settings and sessions that it can't use."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from pillarbox import Consumer, Message, idempotent
from pillarbox.inbox.consuming.load import load_consumer
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.outbox.errors import ConfigError, UnknownImplementationError
from tests.fixtures.consumers import handles

SYNC = sessionmaker[Session]()
ASYNC = async_sessionmaker[AsyncSession]()


def plain(session: Session, message: Message) -> None: ...
async def coroutine(session: AsyncSession, message: Message) -> None: ...


class AsyncCallable:
    async def __call__(self, session: AsyncSession, message: Message) -> None: ...


def consumer(sessions: Any = ASYNC, **changes: Any) -> Consumer:
    return Consumer(MemorySource(), sessions, **{"name": "billing", **changes})


def test_a_plain_function_needs_a_sessionmaker() -> None:
    consumer(SYNC).handles("orders")(plain)
    with pytest.raises(ConfigError, match="handler plain is a plain function"):
        consumer(ASYNC).handles("orders")(plain)


@pytest.mark.parametrize("handler", [coroutine, AsyncCallable()])
def test_a_coroutine_function_needs_an_async_sessionmaker(handler: Any) -> None:
    consumer(ASYNC).handles("orders")(handler)
    with pytest.raises(ConfigError, match="is async, but sessions is a sessionmaker"):
        consumer(SYNC).handles("orders")(handler)


@pytest.mark.parametrize("kind", [{}, {"batch": 2}, {"lease": timedelta(seconds=1)}])
def test_two_receipts_for_one_message_are_refused(kind: dict[str, Any]) -> None:
    handler = idempotent(consumer="c")(coroutine)
    with pytest.raises(ConfigError, match="coroutine: remove @idempotent: the cons"):
        handles(consumer(), "orders", **kind)(handler)


def test_a_lease_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be at least 1s"):
        consumer(SYNC).job("orders", lease=timedelta(milliseconds=1))(print)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ({"batch": 2.5}, "max_size=2.5: must be of type int"),
        ({"lease": 30}, "lease=30"),
    ],
)
def test_the_size_of_a_batch_and_a_lease_of_another_type_are_refused(
    kind: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        handles(consumer(SYNC), "orders", **kind)(print)


def test_anything_but_a_session_factory_is_refused() -> None:
    with pytest.raises(ConfigError, match="isn't a session factory"):
        consumer("postgresql://")


@pytest.mark.parametrize(
    "change",
    [
        {"max_in_flight": 0},
        {"max_in_flight_per_tenant": 0},
        {"max_waiting": -1},
        {"max_idle": timedelta(milliseconds=999)},
        {"max_idle": timedelta(days=25)},
        {"drain": timedelta(seconds=-1)},
        {"order": "tenant"},
        {"order": {"default": "no"}},
        {"queues": {}},
    ],
)
def test_an_invalid_setting_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        consumer(**change)


async def test_a_consumer_without_handlers_does_not_run() -> None:
    with pytest.raises(ConfigError, match="has no handler"):
        await consumer().run()


@pytest.mark.parametrize("weight", [0, -1, 1.5, "2", None, True])
def test_a_weight_is_a_positive_whole_number(weight: Any) -> None:
    with pytest.raises(ConfigError, match=r"weight .* of queue 'default'"):
        consumer(queues={"default": weight})


@pytest.mark.parametrize(
    "changes",
    [
        {"queues": {"defualt": 1}},
        {"source": {"defualt": MemorySource()}},
    ],
)
async def test_the_error_for_a_queue_without_handlers_names_the_others(
    changes: dict[str, Any],
) -> None:
    settings: dict[str, Any] = {"source": MemorySource(), "name": "billing"}
    wrong = Consumer(**(settings | {"sessions": ASYNC} | changes))
    wrong.handles("orders")(coroutine)
    with pytest.raises(ConfigError, match=r"'defualt': no handler .*: default"):
        await wrong.run()


async def test_one_source_does_not_serve_two_queues() -> None:
    two = consumer()
    two.handles("orders")(coroutine)
    two.handles("reports", queue="batch")(coroutine)
    with pytest.raises(ConfigError, match="no source for queue 'default'; pass a URL"):
        await two.run()


async def test_the_error_for_an_unknown_source_lists_the_installed_ones() -> None:
    unknown = Consumer("carrier-pigeon://loft", ASYNC, name="billing")
    unknown.handles("orders")(coroutine)
    with pytest.raises(
        UnknownImplementationError, match=r"installed: .*memory.*postgres"
    ):
        await unknown.run()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("app", "write module:name"),
        ("app:", "write module:name"),
        ("no_such_module:consumer", "No module named 'no_such_module'"),
        ("json:consumer", "is not in json"),
        ("json:decoder", "not a module"),
    ],
)
def test_a_path_that_does_not_name_a_consumer_is_refused(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_consumer(path)
