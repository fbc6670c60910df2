"""A handler that hangs is named, with its message, wherever an operator looks."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from pillarbox import Consumer, Message, add
from pillarbox.inbox.consuming.activity import ConsumerCounts
from pillarbox.inbox.consuming.metrics import ConsumerMetrics
from pillarbox.inbox.events import HandlerDatabaseLost, HandlerOverdue, MessageHandled
from pillarbox.inbox.handlers import calls
from pillarbox.inbox.sources.memory import MemorySource
from pillarbox.inbox.testing.drain import drain
from pillarbox.outbox.administration.connection import administration
from pillarbox.outbox.administration.readers import add_reader
from pillarbox.outbox.cli.main import main
from pillarbox.outbox.events import ProcessMeasured
from pillarbox.outbox.observability import watchdog
from pillarbox.outbox.observability.prometheus import TopicLabels
from pillarbox.outbox.retry import RetryPolicy
from pillarbox.outbox.testing.events import RecordedEvents
from pillarbox.relay.publisher import Acked
from tests.fixtures.adapters import Adapters, adapters_of
from tests.fixtures.consumers import (
    DRIVERS,
    POOLS,
    async_sessions_of,
    consuming,
    handles,
    is_plain,
    running,
    sessions_by,
    sessions_of,
)
from tests.fixtures.dead_letters import give_up, retry
from tests.fixtures.relay import insert
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import browsing
from tests.fixtures.webhook import hook_app, served, status_of

SOON = timedelta(seconds=1)
BROKERS = ("redis", "nats", "rabbitmq", "kafka", "sqs")
AGAIN = RetryPolicy(max_attempts=9, first_delay=timedelta(milliseconds=1))


class Hanging:
    """Handlers that wait until they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.began = threading.Event()

    def plain(self, session: Any, message: Any) -> None:
        self.began.set()
        self.released.wait(60)

    async def coroutine(self, session: Any, message: Any) -> None:
        self.began.set()
        await asyncio.to_thread(self.released.wait, 60)


@pytest.fixture
def hanging() -> Hanging:
    return Hanging()


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()


@asynccontextmanager
async def overdue(
    url: str,
    hanging: Hanging,
    driver: str = "psycopg async",
    message: Message | None = None,
    terms: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[RecordedEvents, Message]]:
    """Run a consumer whose handler hangs for the block."""
    message = message or Message("orders", b"", key="k")
    settings = {"max_idle": SOON, "retry": AGAIN, **settings}
    async with sessions_by(url, driver) as sessions:
        consumer = Consumer(MemorySource(message), sessions, name="billing", **settings)
        hang = hanging.plain if is_plain(driver) else hanging.coroutine
        handles(consumer, "*", **(terms or {}))(hang)
        async with running(consumer) as events:
            try:
                yield events, message
            finally:
                hanging.released.set()
                await events.wait_for(MessageHandled)


@pytest.mark.parametrize("batch", [None, 5], ids=["one by one", "batch"])
@pytest.mark.parametrize("driver", [*DRIVERS, *POOLS])
async def test_a_handler_that_outlives_max_idle_is_reported_with_its_message(
    url: str,
    hanging: Hanging,
    driver: str,
    batch: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with overdue(url, hanging, driver, terms={"batch": batch}) as (events, sent):
        event, *_ = await events.wait_for(HandlerOverdue)
        assert (event.consumer, event.id, event.topic, event.key) == (
            *("billing", sent.id, "orders", "k"),
        )
        kind = "plain" if is_plain(driver) else "coroutine"
        assert event.handler == f"Hanging.{kind}"
        assert event.seconds >= 1
    (line,) = [it for it in caplog.messages if it.startswith("HandlerOverdue")]
    assert "remedy=" in line


@pytest.mark.parametrize("driver", ["psycopg async", "psycopg", "pool"])
async def test_a_handler_that_waits_for_its_receipt_has_not_been_called(
    url: str, hanging: Hanging, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pillarbox.inbox.handlers.attempt.ANSWER_LIMIT", 1.0)
    monkeypatch.setattr("pillarbox.outbox.observability.presence.INTERVAL", 0.1)
    message, limit = Message("orders", b""), timedelta(seconds=3)
    hanging.released.set()
    with psycopg.connect(url) as other:
        receipt = (
            "INSERT INTO inbox.receipt VALUES (%s, inbox.moment_of(%s), now(), %s)"
        )
        other.execute(receipt, [message.id, message.id, "billing"])
        async with sessions_by(url, driver) as sessions:
            consumer = Consumer(
                MemorySource(message), sessions, name="billing", max_idle=limit
            )
            handle = hanging.plain if is_plain(driver) else hanging.coroutine
            consumer.handles("*")(handle)
            async with running(consumer) as events:
                # Only after 4 s.
                await events.wait_for(HandlerDatabaseLost)
                other.rollback()
                await events.wait_for(MessageHandled)
    assert events.of(HandlerOverdue) == []


async def test_it_is_shown_by_every_command_the_page_and_the_metrics(
    url: str, hanging: Hanging, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = CollectorRegistry()
    metrics = ConsumerMetrics(registry, TopicLabels(), ConsumerCounts("billing"))
    with sessions_of(url) as plain, plain.begin() as session:
        message = Message("orders", b"", key="k")
        add(session, message, Message("orders", b"", key="k"))

    async with overdue(url, hanging, message=message, observers=[metrics]) as (
        events,
        _,
    ):
        await events.wait_for(HandlerOverdue)
        recorded = "SELECT 1 FROM inbox.process WHERE running_due <= now()"
        await asyncio.to_thread(wait_for, "a beat", lambda: execute(url, recorded))
        seen = len(events.of(ProcessMeasured))
        await events.wait_for(ProcessMeasured, seen + 1)

        def said(*command: str) -> str:
            main([*command, "--database", url])
            return capsys.readouterr().out

        text = rf"coroutine has been handling {message.id} for \d+s and is overdue"
        for command in (
            ("status",),
            ("doctor",),
            ("blocked",),
            ("trace", str(message.id)),
        ):
            found = await asyncio.to_thread(said, *command)
            assert re.search(text, found), found
        assert "warning  failures: the consumer billing on " in await asyncio.to_thread(
            said, "status"
        )
        assert "no key is blocked" not in await asyncio.to_thread(said, "blocked")

        def looked() -> None:
            with browsing(url) as browser:
                assert re.search(text, browser.get("/overview"))
                assert re.search(text, browser.get(f"/message?id={message.id}"))
                assert 'class="bad-text">Hanging.coroutine, ' in browser.get(
                    "/overview"
                )

        await asyncio.to_thread(looked)
        exported = generate_latest(registry).decode()
        assert re.search(
            r'longest_handler_seconds\{consumer="billing",handler="Hanging.coroutine",'
            r'overdue="true"\} [1-9]',
            exported,
        )
    ended = "SELECT 1 FROM inbox.process WHERE running_id IS NOT NULL"
    assert execute(url, ended) == []


@pytest.fixture(params=[*BROKERS, "postgres"])
def broker(request: pytest.FixtureRequest) -> Adapters | None:
    """The adapters of a broker; None if the consumer reads the outbox itself."""
    if request.param != "postgres":
        return adapters_of(request.param, request)
    database = request.getfixturevalue("url")
    with administration(database, application_name="test") as connection:
        add_reader(connection, "billing", ["*"], for_consumer=True, from_oldest=True)
    return None


async def test_it_is_named_and_recorded_over_every_broker(
    url: str,
    hanging: Hanging,
    broker: Adapters | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pillarbox.outbox.observability.presence.INTERVAL", 0.1)
    name = f"billing-{uuid4().hex}" if broker else "billing"
    topics = broker.topics if broker else ["placed"]
    source = broker.source(name) if broker else url
    message = Message(topics[0], b"", key="k")
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(source, sessions, name=name, max_idle=SOON, retry=AGAIN)
        for topic in topics:
            consumer.handles(topic)(hanging.coroutine)
        async with running(consumer) as events:
            if broker is None:
                await asyncio.to_thread(insert, url, message)
            else:
                async with broker.publisher() as publisher:
                    assert await publisher.publish([message]) == [Acked()]
            event, *_ = await events.wait_for(HandlerOverdue)
            assert (event.id, event.topic) == (message.id, message.topic)
            query = "SELECT running_id FROM inbox.process WHERE running_due <= now()"
            found = partial(wait_for, "a beat", lambda: execute(url, query))
            assert await asyncio.to_thread(found) == [(message.id,)]
            hanging.released.set()
            await events.wait_for(MessageHandled)


async def test_a_job_is_shown_and_overdue_only_after_its_own_limit(
    url: str, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_LONG", 0.05)
    terms = {"lease": timedelta(seconds=30)}
    recorded = "SELECT running_due FROM inbox.process WHERE running_id IS NOT NULL"
    async with overdue(url, hanging, terms=terms) as (events, _):
        rows = await asyncio.to_thread(
            wait_for, "a beat", lambda: execute(url, recorded)
        )
        assert rows == [(None,)]
        assert not events.of(HandlerOverdue)


async def test_a_plain_job_that_outlives_its_time_limit_is_reported(
    url: str, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_LONG", 0.05)
    terms = {"lease": timedelta(seconds=30), "time_limit": SOON}
    async with overdue(url, hanging, "psycopg", terms=terms) as (events, message):
        (event,) = await events.wait_for(HandlerOverdue)
        assert event.id == message.id
        hanging.released.set()


async def test_a_longer_time_limit_says_that_a_handler_may_take_longer(
    url: str, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = timedelta(hours=1)
    seen: list[float | None] = []
    began = calls.Calls.begin

    def begin(*arguments: Any, **more: Any) -> calls.Call:
        call = began(*arguments, **more)
        seen.append(call.limit)
        return call

    monkeypatch.setattr(calls.Calls, "begin", begin)
    async with overdue(url, hanging, terms={"time_limit": limit}):
        await asyncio.to_thread(hanging.began.wait)
    assert seen[0] is not None
    assert seen[0] > limit.total_seconds()


async def test_the_handlers_of_a_webhook_are_watched_too(
    inbox_url: str,
    inbox_sessions: async_sessionmaker[AsyncSession],
    events: RecordedEvents,
    hanging: Hanging,
) -> None:
    app = hook_app(hanging.coroutine, inbox_sessions, events, max_idle=SOON)
    message = Message("orders", b"1")
    async with served(app) as hook:
        posting = asyncio.create_task(status_of(hook, message))
        (event,) = await events.wait_for(HandlerOverdue)
        assert event.id == message.id
        hanging.released.set()
        await posting


LINE = r'LoopBlocked (.|\n)*test_overdue\.py", line \d+, in block\n'


async def test_a_coroutine_that_blocks_the_event_loop_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "_BLOCKED", 0.1)

    async def block(session: AsyncSession, message: Message) -> None:
        wait_for("a warning", lambda: re.search(LINE, caplog.text))

    async with consuming(url, MemorySource(Message("orders", b"")), block) as events:
        await events.wait_for(MessageHandled)


async def test_retries_of_dead_letters_are_watched_too(
    url: str, hanging: Hanging, events: RecordedEvents
) -> None:
    message = Message("orders", b"1")
    give_up(url, message, schema="inbox")
    async with async_sessions_of(url) as sessions:
        consumer = Consumer("memory://", sessions, name="billing", max_idle=SOON)
        consumer.handles("*")(hanging.coroutine)
        retrying = asyncio.create_task(retry(consumer.retrier(None, events)))
        (event,) = await events.wait_for(HandlerOverdue)
        assert event.id == message.id
        hanging.released.set()
        await retrying


async def test_drain_names_a_handler_that_hangs(
    url: str, hanging: Hanging, caplog: pytest.LogCaptureFixture
) -> None:
    async with async_sessions_of(url) as sessions:
        consumer = Consumer(
            "memory://", sessions, name="billing", max_idle=SOON, retry=AGAIN
        )
        consumer.handles("*")(hanging.coroutine)
        async with sessions.begin() as session:
            add(session, Message("orders", b""))
        draining = asyncio.create_task(drain(consumer, sessions=sessions))
        await asyncio.to_thread(
            wait_for, "a warning", lambda: "HandlerOverdue" in caplog.text
        )
        hanging.released.set()
        await draining
