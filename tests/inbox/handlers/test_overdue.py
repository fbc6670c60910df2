"""A handler that hangs is named, with its message, wherever an operator looks."""

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker

from inbox.consuming.activity import ConsumerCounts
from inbox.consuming.metrics import ConsumerMetrics
from inbox.events import HandlerOverdue, MessageHandled
from inbox.handlers import calls
from inbox.sources.memory import MemorySource
from inbox.testing.drain import drain
from outbox.cli.main import main
from outbox.events import ProcessMeasured
from outbox.observability import watchdog
from outbox.observability.prometheus import TopicLabels
from outbox.retry import RetryPolicy
from outbox.testing.events import RecordedEvents
from pillarbox import Consumer, Message, add
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
from tests.fixtures.sessions import execute
from tests.fixtures.waiting import wait_for
from tests.fixtures.web import browsing
from tests.fixtures.webhook import hook_app, served, status_of

SOON = timedelta(seconds=1)
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


async def test_a_coroutine_that_blocks_the_event_loop_is_named(
    url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(watchdog, "_BLOCKED", 0.1)

    async def block(session: AsyncSession, message: Message) -> None:
        wait_for("a warning", lambda: "LoopBlocked" in caplog.text)

    async with consuming(url, MemorySource(Message("orders", b"")), block) as events:
        await events.wait_for(MessageHandled)
    assert "test_overdue.py" in caplog.text
    assert "in block" in caplog.text


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
